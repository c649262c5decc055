"""The samples that `tests/workers/samples.py` trained on in every step, on any worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

EPOCHS, BATCHES = 4, 6

Steps = dict[int, list[int]]


@dataclass(frozen=True)
class Attempt:
    """A start of the script: its workers, their replicas, and the kill that ends it.

    `kill` is `worker:epoch:batch`, or empty.
    """

    workers: int
    devices: int = 1
    kill: str = ""

    def __str__(self) -> str:
        return f"{self.workers}x{self.devices}" if self.devices > 1 else str(self.workers)


def noted(folder: Path, attempt: Attempt, number: int) -> Steps:
    """Returns the ordered samples of every global batch, by the step that trained on it."""
    parts: dict[int, dict[int, list[int]]] = {}
    for worker in range(attempt.workers):
        for line in (folder / f"samples-{number}-{worker}").read_text().splitlines():
            step, replica, *samples = map(int, line.split())
            assert replica not in parts.setdefault(step, {})
            parts[step][replica] = samples
    # TensorFlow distributes the parts of a batch to the workers in turn.
    order = sorted(
        range(attempt.workers * attempt.devices),
        key=lambda replica: (replica % attempt.devices, replica // attempt.devices),
    )
    return {
        # In the last step of a killed attempt, a worker may have recorded nothing.
        step: [sample for replica in order for sample in of_replicas.get(replica, ())]
        for step, of_replicas in sorted(parts.items())
    }


def trained(folder: Path, attempts: Sequence[Attempt]) -> Steps:
    """Returns the steps that count.

    Every attempt resumes the previous one mid-epoch, and repeats its steps after the last
    checkpoint.
    """
    noted_of = [noted(folder, attempt, number) for number, attempt in enumerate(attempts)]
    begins = [min(steps) for steps in noted_of]
    assert all(begin % BATCHES for begin in begins[1:])
    found: Steps = {}
    for steps, (begin, until) in zip(noted_of, pairwise([*begins, EPOCHS * BATCHES]), strict=True):
        assert begin < until
        found |= {step: samples for step, samples in steps.items() if step < until}
    return found


def assert_close(outcome: Mapping[str, np.ndarray], end: Mapping[str, np.ndarray]) -> None:
    """Checks equality, except for rounding."""
    assert outcome.keys() == end.keys()
    for name, array in end.items():
        np.testing.assert_allclose(outcome[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
