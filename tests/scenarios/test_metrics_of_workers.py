"""Metrics of the replicas of several workers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cluster import run_workers

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.cluster

from support.curves import curves_in  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "workers" / "metrics.py"
OF_REPLICAS = ("loss", "gradient_norm", "samples_per_s", "compute_ms", "sync_ms")
OF_WORKERS = ("step_ms", "input_ms", "memory_mb")


@dataclass(frozen=True)
class Job:
    workers: int
    found: list[dict[str, Any]]
    output: str
    folder: Path


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.soak)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("curves")
    ended = run_workers([str(SCRIPT), str(folder)], request.param, timeout_s=240)
    outputs = "\n".join(each.output for each in ended)
    assert [each.returncode for each in ended] == [0] * request.param, outputs
    lines = [line for each in ended for line in each.output.splitlines() if "FOUND " in line]
    found = [json.loads(line.partition("FOUND ")[2]) for line in lines]
    return Job(request.param, found, outputs, folder)


def test_same_bits(job: Job) -> None:
    """Training with the metrics is bit-identical to training without."""
    for each in job.found:
        assert each["watched"]["bits"] == each["bare"]["bits"]
        assert each["watched"]["history"]["loss"] == each["bare"]["history"]["loss"]


def test_in_logs(job: Job) -> None:
    """All workers have the same logs, and the total loss is between those of the replicas."""
    histories = [each["watched"]["history"] for each in job.found]
    assert histories == [histories[0]] * job.workers
    [history] = histories[:1]
    for loss, low, high in zip(
        history["loss"], history["replica/loss_min"], history["replica/loss_max"], strict=True
    ):
        assert low < loss < high
    assert min(history["replica/gradient_norm_spread"]) > 0
    assert min(history["replica/step_ms_max"]) > 0


def test_curves(job: Job) -> None:
    """The chief writes all curves, for every window including the last one."""
    curves = curves_in(job.folder / "watched")
    numbers = range(job.workers)
    every = (*OF_REPLICAS, *OF_WORKERS)
    expected = {
        **{f"replica-{each}": OF_REPLICAS for each in numbers},
        **{f"worker-{each}": OF_WORKERS for each in numbers},
        **dict.fromkeys(("min", "median", "p95", "max"), every),
    }
    for run, names in expected.items():
        assert set(curves.pop(run)) == {f"distplug/{name}" for name in names}
    assert not curves
    for each in numbers:
        [losses] = [curves_in(job.folder / "watched")[f"replica-{each}"]["distplug/loss"]]
        assert [step for step, _ in losses] == [2, 4, 6, 8, 10, 12]
        assert len({loss for _, loss in losses}) == 6


def test_diverged(job: Job) -> None:
    """Different weights on the last worker are reported once, at the next comparison, by the
    chief."""
    last = job.workers - 1
    for worker, each in enumerate(job.found):
        assert each["watched"]["found"] == []
        if worker:
            assert each["drifts"]["found"] == []
    [found] = job.found[0]["drifts"]["found"]
    assert found["step"] == 8
    assert found["variable"].endswith("/bias")
    assert found["replicas"] == ([0, 1] if job.workers == 2 else [last])
    assert f"worker-{last} on " in str(found["where"])


def test_same_data(job: Job) -> None:
    """A dataset that is not split among the workers is reported once, and a split one is not."""
    numbers = ", ".join(map(str, range(job.workers)))
    reported = f"replicas: {numbers} received the same data"
    assert job.output.count(reported) == 1
    assert job.output.count("received the same data") == 1
