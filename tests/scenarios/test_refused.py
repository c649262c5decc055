"""Real processes that end with a `ConfigurationError`: no process is restarted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.cluster import run_job, run_workers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "workers" / "refused.py"


@pytest.mark.parametrize(
    ("workers", "where", "expected"),
    [
        (2, ["callback", "1"], "says 1"),
        *(
            pytest.param(*row, marks=pytest.mark.soak)
            for row in [
                (1, ["fit"], "validation_split"),
                (1, ["defaults"], "nonsense"),
                (2, ["init"], "nonsense"),
                (2, ["fit"], "validation_split"),
                (3, ["callback", "0"], "says 0"),
            ]
        ),
    ],
)
def test_under_a_supervisor(workers: int, where: list[str], expected: str, tmp_path: Path) -> None:
    """Whatever its origin and the number of workers, the job ends with 93 and the reason."""
    ended = run_job([str(SCRIPT), str(tmp_path), *where], workers, timeout_s=200)
    assert ended.returncode == 93, ended.output
    started = (tmp_path / "started").read_text().split()
    assert sorted(started) == [str(worker) for worker in range(workers)]
    assert "not restarted: it would fail in the same way; exit code 93" in ended.output
    first = ended.output.rpartition("first failure: worker-")[2].splitlines()[0]
    assert re.match(
        rf"\d asked not to be restarted \(exit code 93\): \w+Error: .*{expected}", first
    )


@pytest.mark.parametrize("refuses", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_in_a_scheduler_cluster(refuses: int, tmp_path: Path) -> None:
    """Without a supervisor, the worker itself exits with 93, and the one that lost it with 201."""
    ended = run_workers([str(SCRIPT), str(tmp_path), "callback", str(refuses)], 2, timeout_s=200)
    codes = [each.returncode for each in ended]
    expected = [201, 201]
    expected[refuses] = 93
    assert codes == expected, ended[refuses].output
    assert f"This cannot be, says {refuses}" in ended[refuses].output
