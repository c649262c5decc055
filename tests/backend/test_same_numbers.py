"""The results of fit, evaluate and predict do not depend on the number of workers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.cluster import run_workers

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "workers" / "same_numbers.py"

Outcome = dict[str, np.ndarray]


def outcomes(mode: str, folder: Path, workers: int) -> tuple[list[Outcome], str]:
    ended = run_workers([str(SCRIPT), mode, str(folder)], workers, timeout_s=240)
    for one in ended:
        assert one.returncode == 0, one.output
    found = [dict(np.load(folder / f"{mode}-{worker}.npz")) for worker in range(workers)]
    return found, ended[0].output


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Returns the results of one process with plain Keras and the same global batch."""
    [outcome], _ = outcomes("reference", tmp_path_factory.mktemp("reference"), workers=1)
    return outcome


def assert_close(found: list[Outcome], reference: Outcome) -> None:
    """Prints the largest difference (`pytest -rP` shows it), then asserts that it is small."""
    assert all(sorted(outcome) == sorted(reference) for outcome in found)
    differences = {}
    for name, expected in reference.items():
        scale = np.abs(expected).max() or 1.0
        for worker, outcome in enumerate(found):
            assert outcome[name].shape == expected.shape, name
            difference = np.abs(outcome[name] - expected).max() / scale
            differences[f"{name} of worker {worker}"] = float(difference)
            same = outcome[name].tobytes() == found[0][name].tobytes()
            assert same, f"{name} of worker {worker} is not the chief's"
    worst = max(differences, key=lambda name: differences[name])
    print(f"largest relative difference: {differences[worst]:.2e}, {worst}")
    assert all(difference <= 1e-5 for difference in differences.values()), differences


@pytest.mark.parametrize(
    ("mode", "workers"),
    [
        ("plain_fit", 2),
        ("evaluate_first", 2),
        ("outside_scope", 2),
        ("made_first", 2),
        ("made_first_arrays", 2),
        ("builder", 3),
    ],
)
def test_workers(mode: str, workers: int, reference: Outcome, tmp_path: Path) -> None:
    """Weights, optimizer, History, evaluate and predict equal those of one process within 1e-5, and
    are bit-identical on every worker: with synchronized BatchNormalization, a regularizer, sample
    weights, metrics, validation data, clipping by the global norm, and an uneven last batch."""
    found, printed = outcomes(mode, tmp_path, workers)
    assert_close(found, reference)
    if mode != "plain_fit":  # in that mode, the script creates the strategy
        assert re.search(rf"{workers} workers, {workers} replicas", printed)
