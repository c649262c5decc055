"""Each time another number of workers: the samples of a training, and their order, stay."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.cluster import run_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "samples.py"
EPOCHS, BATCHES, SAMPLES = 4, 6, 42

Steps = dict[int, list[int]]


@dataclass(frozen=True)
class Attempt:
    """A start of the script: how many workers, of how many replicas, and the kill that ends it.

    `kill` is `worker:epoch:batch`, or empty.
    """

    workers: int
    devices: int = 1
    kill: str = ""

    def __str__(self) -> str:
        return f"{self.workers}x{self.devices}" if self.devices > 1 else str(self.workers)


def run(folder: Path, data: str, attempts: list[Attempt]) -> dict[str, np.ndarray]:
    """What the last attempt ends with; the others were killed as they should be."""
    for attempt in attempts:
        options = ["--max-restarts", "0"]
        if attempt.devices > 1:
            options += ["--devices-per-worker", str(attempt.devices)]
        script = [str(SCRIPT), str(folder), data, *filter(None, [attempt.kill])]
        ended = run_job(script, attempt.workers, *options, timeout_s=240)
        assert ended.returncode == (128 + signal.SIGKILL if attempt.kill else 0), ended.output
    kills = [attempt.kill for attempt in attempts if attempt.kill]
    assert not kills or (folder / "kills").read_text().split() == kills
    return dict(np.load(folder / "outcome-0.npz"))


def noted(folder: Path, attempt: Attempt, number: int) -> Steps:
    """The samples of each global batch, in their order, by the step that trained on it."""
    parts: dict[int, dict[int, list[int]]] = {}
    for worker in range(attempt.workers):
        for line in (folder / f"samples-{number}-{worker}").read_text().splitlines():
            step, replica, *samples = map(int, line.split())
            assert replica not in parts.setdefault(step, {})
            parts[step][replica] = samples
    # TensorFlow deals the parts of a batch out to the workers in turn.
    order = sorted(
        range(attempt.workers * attempt.devices),
        key=lambda replica: (replica % attempt.devices, replica // attempt.devices),
    )
    return {
        # Of the last step of a killed attempt a worker may have noted nothing.
        step: [sample for replica in order for sample in of_replicas.get(replica, ())]
        for step, of_replicas in sorted(parts.items())
    }


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Steps, dict[str, np.ndarray]]]:
    @cache
    def undisturbed(data: str) -> tuple[Steps, dict[str, np.ndarray]]:
        """One worker, from the first step to the last one."""
        folder = tmp_path_factory.mktemp("undisturbed")
        outcome = run(folder, data, [Attempt(1)])
        return noted(folder, Attempt(1), 0), outcome

    return undisturbed


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
    undisturbed: Callable[[str], tuple[Steps, dict[str, np.ndarray]]],
    tmp_path: Path,
) -> None:
    """Killed in mid-epoch and gone on with by more workers, killed, and gone on with by one: each
    global batch holds the samples it would have held, in their order, also where a batch does not
    divide and where a replica has none; no sample comes twice in an epoch, none is left out; and
    the end is that of an undisturbed training but for rounding."""
    expected, end = undisturbed(data)
    assert list(expected) == list(range(EPOCHS * BATCHES))
    for epoch in range(EPOCHS):
        steps = range(epoch * BATCHES, (epoch + 1) * BATCHES)
        assert sorted(s for step in steps for s in expected[step]) == list(range(SAMPLES))

    outcome = run(tmp_path, data, attempts)
    noted_of = [noted(tmp_path, attempt, number) for number, attempt in enumerate(attempts)]
    begins = [min(steps) for steps in noted_of]
    assert all(begin % BATCHES for begin in begins[1:])  # in mid-epoch
    found: Steps = {}
    # What an attempt trained behind its last checkpoint is trained again by the next one.
    for steps, (begin, until) in zip(noted_of, pairwise([*begins, EPOCHS * BATCHES]), strict=True):
        assert begin < until
        found |= {step: samples for step, samples in steps.items() if step < until}
    assert found == expected

    assert outcome.keys() == end.keys()
    for name, array in end.items():
        np.testing.assert_allclose(outcome[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
