"""The number of workers changes at every restart: samples and their order do not."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.cluster import run_job
from support.trained_samples import BATCHES, EPOCHS, Attempt, Steps, assert_close, noted, trained

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "samples.py"
SAMPLES = 42


def run(folder: Path, data: str, attempts: list[Attempt]) -> dict[str, np.ndarray]:
    """Returns the result of the last attempt; the others were killed as planned."""
    kills = [attempt.kill for attempt in attempts if attempt.kill]
    for attempt in attempts:
        options = ["--max-restarts", "0"]
        if attempt.devices > 1:
            options += ["--devices-per-worker", str(attempt.devices)]
        script = [str(SCRIPT), str(folder), data, *kills]
        ended = run_job(script, attempt.workers, *options, timeout_s=240)
        assert ended.returncode == (128 + signal.SIGKILL if attempt.kill else 0), ended.output
    assert not kills or (folder / "kills").read_text().split() == kills
    return dict(np.load(folder / "outcome-0.npz"))


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Steps, dict[str, np.ndarray]]]:
    @cache
    def uninterrupted(data: str) -> tuple[Steps, dict[str, np.ndarray]]:
        """A single worker, from the first step to the last one."""
        folder = tmp_path_factory.mktemp("uninterrupted")
        outcome = run(folder, data, [Attempt(1)])
        return noted(folder, Attempt(1), 0), outcome

    return uninterrupted


@pytest.mark.parametrize(
    ("data", "attempts"),
    [
        pytest.param(
            *("arrays", [Attempt(2, kill="1:1:3"), Attempt(3, kill="0:2:3"), Attempt(1)]),
            marks=pytest.mark.soak,
        ),
        ("tf.data", [Attempt(2, kill="0:1:2"), Attempt(3, kill="2:2:4"), Attempt(1)]),
        ("PyDataset", [Attempt(2, 2, kill="1:1:4"), Attempt(3, kill="1:2:3"), Attempt(1, 2)]),
    ],
    ids=lambda value: value if isinstance(value, str) else " to ".join(map(str, value)),
)
def test_changed(
    data: str,
    attempts: list[Attempt],
    uninterrupted: Callable[[str], tuple[Steps, dict[str, np.ndarray]]],
    tmp_path: Path,
) -> None:
    """Killed mid-epoch, resumed by more workers, killed, and resumed by one worker.

    Every global batch holds the same samples in the same order, even if it cannot be divided
    equally or a replica gets none. No sample is repeated or skipped in an epoch. The result equals
    that of an uninterrupted training, except for rounding.
    """
    expected, end = uninterrupted(data)
    assert list(expected) == list(range(EPOCHS * BATCHES))
    for epoch in range(EPOCHS):
        steps = range(epoch * BATCHES, (epoch + 1) * BATCHES)
        assert sorted(s for step in steps for s in expected[step]) == list(range(SAMPLES))

    outcome = run(tmp_path, data, attempts)
    assert trained(tmp_path, attempts) == expected
    assert_close(outcome, end)
