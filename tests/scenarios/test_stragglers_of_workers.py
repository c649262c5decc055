"""A worker that is slower than the others at computing or at loading data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Host, run_workers
from support.networks import hosts

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.cluster

FINE = 5  # windows before the network becomes slow
SCRIPT = Path(__file__).parents[1] / "workers" / "stragglers.py"
CASES: dict[str, dict[str, Any]] = {
    "bare": {"case": "none", "slow": -1, "windows": 12, "is_watched": False},
    "balanced": {"case": "none", "slow": -1, "windows": 12},
    "wandering": {"case": "wandering", "slow": -1, "windows": 16},
    "compute": {"case": "compute", "slow": 1, "windows": 8},
    "compute of the chief": {"case": "compute", "slow": 0, "windows": 8},
    "input": {"case": "input", "slow": 1, "windows": 8},
}


SLOW = [
    ("compute", "compute", 1),
    ("compute of the chief", "compute", 0),
    ("input", "input", 1),
]
NETWORK = {"network": {"case": "network", "slow": 1, "windows": 14, "fine": FINE}}


def findings(
    workers: int, cases: dict[str, dict[str, Any]], hosts: list[Host] | None = None
) -> list[dict[str, Any]]:
    """Returns the findings of all workers."""
    command = [str(SCRIPT), json.dumps(cases)]
    ended = run_workers(command, workers, hosts=hosts, timeout_s=240)
    outputs = "\n".join(each.output for each in ended)
    assert [each.returncode for each in ended] == [0] * workers, outputs
    lines = [line for each in ended for line in each.output.splitlines() if "FOUND " in line]
    return [json.loads(line.partition("FOUND ")[2]) for line in lines]


WORKERS = [2, pytest.param(3, marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=WORKERS)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return findings(request.param, CASES)


@pytest.mark.parametrize(("case", "cause", "worker"), SLOW)
def test_slow_worker(case: str, cause: str, worker: int, found: list[dict[str, Any]]) -> None:
    """Only the slow worker is named, with the cause, and the chief reports it."""
    for each in found[1:]:
        assert each[case]["found"] == []
    [reported] = found[0][case]["found"]
    assert (reported["cause"], reported["worker"], reported["is_over"]) == (cause, worker, False)
    assert reported["replica"] == (worker if cause == "compute" else None)
    assert reported["score"] < 0.75
    assert f"worker-{worker} on " in reported["reported"]


@pytest.mark.parametrize("case", ["balanced", "wandering"])
def test_no_straggler(case: str, found: list[dict[str, Any]]) -> None:
    """If all workers are equally slow, or only briefly slow, none is named."""
    assert [each[case]["found"] for each in found] == [[]] * len(found)


@pytest.mark.parametrize("workers", WORKERS)
def test_slow_network(workers: int) -> None:
    """Only the worker with the slow network is named, although all compute and read equally
    fast."""
    with hosts(workers) as places:
        chief, *_ = findings(workers, NETWORK, places)
    found = [(each["cause"], each["worker"]) for each in chief["network"]["found"]]
    assert found == [("network", 1)]


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("workers", [2, 3])
def test_soak(workers: int, number: int) -> None:
    """Repeated many times, and always found within five windows: `python -m pytest --stage soak
    -s`."""
    chief, *_ = findings(workers, CASES)
    with hosts(workers) as places:
        chief |= findings(workers, NETWORK, places)[0]
    slow = {case: (cause, worker) for case, cause, worker in [*SLOW, ("network", "network", 1)]}
    reported = {
        case: [(each["cause"], each["worker"]) for each in chief[case]["found"]] for case in chief
    }
    took = {case: [each["windows"] for each in chief[case]["found"]] for case in slow}
    took["network"] = [each - FINE for each in took["network"]]
    print(f"{workers} workers, {number}: {reported}, in windows: {took}", flush=True)
    assert reported == {case: [slow[case]] if case in slow else [] for case in chief}
    assert max(windows for each in took.values() for windows in each) <= 5


def test_same_bits(found: list[dict[str, Any]]) -> None:
    """Training with timing is bit-identical to training without."""
    for each in found:
        bare, watched = each["bare"], each["balanced"]
        assert (watched["bits"], watched["history"]) == (bare["bits"], bare["history"])
