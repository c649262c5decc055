"""Every row of `rows.py` in every setup: equal to one process of plain Keras, or refused.

In CI, an eighth of the rows run, in one setup each, alternately with several workers and in a
single process; the whole matrix, half an hour on two cores, is `nightly`. With the lowest versions,
CI runs an eighth as well, in one setup each.

pytest tests/contracts -rP          shows the largest error of every row
python tests/contracts/table.py     runs all, and writes the table in docs/verified.md
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from contracts.row import Row
from contracts.rows import ROWS
from support.cluster import Ended, run_workers

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "matrix.py"
A_ROW_TIMEOUT_S = 40  # on average


@dataclass(frozen=True)
class Column:
    strategy: str
    workers: int
    devices: int

    @property
    def replicas(self) -> int:
        return self.workers * self.devices


COLUMNS = {
    "2 mirrored": Column("mirrored", 1, 2),
    "3 mirrored": Column("mirrored", 1, 3),
    "2 central": Column("central_storage", 1, 2),
    "2 workers": Column("multi_worker", 2, 1),
    "3 workers": Column("multi_worker", 3, 1),
    "2 workers x 2": Column("multi_worker", 2, 2),
}
# The setups in which CI runs the rows, in turn.
TURNS = ("2 workers", "2 mirrored", "3 workers", "3 mirrored")
TURNS += ("2 workers", "2 central", "2 workers x 2", "2 mirrored")
NAMES = [(family, name) for family, rows in ROWS.items() for name in rows]


@dataclass(frozen=True)
class Ran:
    """A setup whose rows have all run."""

    folder: Path
    names: list[tuple[str, str]]
    ended: list[Ended]

    def stem(self, family: str, name: str, which: object) -> Path:
        return self.folder / f"{self.names.index((family, name))}-{which}"


class Matrix:
    def __init__(self, folder: Path, columns: Mapping[str, list[tuple[str, str]]]) -> None:
        self._folder = folder
        every = sorted({row for rows in columns.values() for row in rows}, key=NAMES.index)
        replicas = sorted({COLUMNS[column].replicas for column in columns})
        # Tracing keeps one core per process busy.
        with ThreadPoolExecutor(2) as two_at_a_time:
            reference = two_at_a_time.submit(  # the longest, so it starts first
                self._run, "reference", every, KERAS_DISTPLUG_TEST_REPLICAS=json.dumps(replicas)
            )
            alone = {
                name: two_at_a_time.submit(self._run, name, rows)
                for name, rows in columns.items()
                if COLUMNS[name].workers == 1
            }
        self.reference = reference.result()
        self.columns = {name: one.result() for name, one in alone.items()}
        for name, rows in columns.items():
            if name not in self.columns:
                self.columns[name] = self._run(name, rows)

    def _run(self, name: str, rows: list[tuple[str, str]], **env: str) -> Ran:
        column = COLUMNS.get(name, Column("reference", 1, 1))
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        (folder / "names.json").write_text(json.dumps(rows))
        ended = run_workers(
            [str(SCRIPT), column.strategy, str(folder)],
            column.workers,
            env={"KERAS_DISTPLUG_TEST_DEVICES": str(column.devices), **env},
            timeout_s=60 + A_ROW_TIMEOUT_S * len(rows),
        )
        return Ran(folder, rows, ended)


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Runs the rows that this session needs, in one group of processes per column."""
    requested: dict[str, list[tuple[str, str]]] = {}
    for item in request.session.items:
        if getattr(item, "originalname", "") == test_row.__name__:
            params = item.callspec.params  # type: ignore[attr-defined]
            if is_available(ROWS[params["family"]][params["name"]]):
                requested.setdefault(params["column"], []).append(
                    (params["family"], params["name"])
                )
    return Matrix(tmp_path_factory.mktemp("matrix"), requested)


def is_available(row: Row) -> bool:
    """True if the installed Keras has the name that the row needs."""
    if row.needs is None:
        return True
    module, _, name = row.needs.rpartition(".")
    return hasattr(importlib.import_module(f"keras.{module}"), name)


def marks(number: int, row: Row, column: str) -> list[pytest.MarkDecorator]:
    has_turn = column == TURNS[number % len(TURNS)] and number // len(TURNS) % 8 == 0
    return [pytest.mark.nightly] * (not has_turn) + [pytest.mark.lowest] * row.lowest


@pytest.mark.parametrize(
    ("family", "name", "column"),
    [
        pytest.param(
            *(family, name, column),
            id=f"{name}-{column.replace(' ', '_')}",
            marks=marks(number, ROWS[family][name], column),
        )
        for number, (family, name) in enumerate(NAMES)
        for column in COLUMNS
    ],
)
def test_row(
    family: str,
    name: str,
    column: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    for key, value in (("family", family), ("row", name), ("column", column)):
        record_property(key, value)
    row = ROWS[family][name]
    if not is_available(row):
        pytest.skip(f"this Keras has no {row.needs}")
    matrix: Matrix = request.getfixturevalue("matrix")
    ran = matrix.columns[column]
    stems = [ran.stem(family, name, n) for n in range(COLUMNS[column].workers)]
    errors = [e.read_text() for s in stems if (e := s.with_suffix(".error")).exists()]
    if row.refused is not None:
        assert len(errors) == len(stems), f"not refused\n{ran.ended[0].output[-2000:]}"
        for error in errors:
            assert error.startswith("ModelError: ")
            assert row.refused in error
        record_property("outcome", "refused")
        return
    assert not errors, errors[0]
    for stem, ended in zip(stems, ran.ended, strict=True):
        assert stem.with_suffix(".npz").exists(), ended.output[-4000:]
    which = "any" if row.reference is None else COLUMNS[column].replicas
    expected = np.load(matrix.reference.stem(family, name, which).with_suffix(".npz"))
    found = [np.load(stem.with_suffix(".npz")) for stem in stems]
    errors_of = {}
    for key in expected.files:
        for worker, one in enumerate(found):
            assert sorted(one.files) == sorted(expected.files)
            assert one[key].shape == expected[key].shape, key
            assert one[key].dtype == expected[key].dtype, key
            same = one[key].tobytes() == found[0][key].tobytes()
            assert same, f"{key} of worker {worker} is not the chief's"
        errors_of[key] = largest_error(found[0][key], expected[key])
    worst = max(errors_of, key=lambda key: errors_of[key])
    print(f"largest error: {errors_of[worst]:.1e}, {worst}")
    record_property("outcome", errors_of[worst])
    assert errors_of[worst] <= row.error, errors_of


def largest_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns max|a - b| / max|b|; infinite if `a` is finite where `b` is not, or vice versa, or if
    their infinities have different signs."""
    a, b = found.astype("float64"), expected.astype("float64")
    finite = np.isfinite(b)
    if (
        not np.array_equal(a[~finite], b[~finite], equal_nan=True)
        or not np.isfinite(a[finite]).all()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(b[finite]).max()) or 1.0
    return float(np.abs(a[finite] - b[finite]).max()) / scale
