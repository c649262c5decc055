"""Kills of random kinds at random times: the result is that of an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support import fault
from support.cluster import run_job
from support.harmed import Outcome, differences
from support.kills import drawn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "workers" / "exact.py"
SETUPS = {
    "single": ("single", 1, 1),
    "mirrored": ("mirrored", 1, 1),
    "2 workers": ("multi_worker", 2, 1),
    "2 workers x 2": ("multi_worker", 2, 2),
}

Train = Callable[..., list[Outcome]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    @cache
    def train(setup: str, seed: int, kills: int, control: str | None = None) -> list[Outcome]:
        """Returns the results of all workers; checks that the planned number was killed."""
        folder = tmp_path_factory.mktemp("job")
        name, workers, devices = SETUPS[setup]
        faults = drawn(seed, kills, workers)
        fault.write(folder, faults)
        script = [str(SCRIPT), str(folder), name, str(seed)]
        options = ["--max-restarts", str(kills)]
        if devices > 1:
            options += ["--devices-per-worker", str(devices)]
        ended = run_job(
            [*script, *([control] if control else [])], workers, *options, timeout_s=600
        )
        assert ended.returncode == 0, ended.output
        came = [each.index for each in fault.fired(folder)]
        assert came == list(range(kills)), ended.output
        return [dict(np.load(folder / f"outcome-worker-{n}.npz")) for n in range(workers)]

    return train


def compare(train: Train, setup: str, seed: int) -> None:
    expected = train(setup, seed % 2, 0)  # everything that depends on the seed, except the kills
    found = train(setup, seed, 1 + seed % 4)
    for worker, outcome in enumerate(found):
        assert differences(outcome, expected[worker]) == []


# Except for the kills, only the seed's parity matters: there are two uninterrupted runs.
SEEDS = {"single": (1,), "mirrored": (1,), "2 workers x 2": (8,)}


@pytest.mark.parametrize(
    ("setup", "seed"), [(setup, seed) for setup, seeds in SEEDS.items() for seed in seeds]
)
def test_killed_at_random(train: Train, setup: str, seed: int) -> None:
    """One to four kills (SIGKILL, os._exit, exception) at any time.

    They occur after any batch, during a save, during validation, or between epochs. Weights,
    optimizer, History, the state of EarlyStopping and the rows of CSVLogger are bit-identical to
    those of an uninterrupted run, on every worker.
    """
    compare(train, setup, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("setup", SETUPS)
def test_soak(train: Train, setup: str, seed: int) -> None:
    """The same for 25 seeds: `python -m pytest --stage soak`."""
    compare(train, setup, seed)


@pytest.mark.parametrize(
    ("setup", "control", "seed", "kills", "part"),
    [
        ("single", "seeds", 33, 1, "variable"),  # in the second epoch, so that three remain
        pytest.param("single", "metrics", 3, 4, "history", marks=pytest.mark.soak),
        pytest.param("mirrored", "replicas", 3, 4, "history", marks=pytest.mark.soak),
        pytest.param("2 workers", "replicas", 3, 4, "history", marks=pytest.mark.soak),
        pytest.param("2 workers", "seeds", 3, 4, "variable", marks=pytest.mark.soak),
        pytest.param("2 workers", "metrics", 3, 4, "history", marks=pytest.mark.soak),
    ],
)
def test_control(train: Train, setup: str, control: str, seed: int, kills: int, part: str) -> None:
    """The comparison notices if seeds, metrics, or the metrics of a replica are not restored."""
    found_and_expected = zip(train(setup, seed, kills, control), train(setup, 1, 0), strict=True)
    for found, expected in found_and_expected:
        assert any(name.startswith(part) for name in differences(found, expected))
