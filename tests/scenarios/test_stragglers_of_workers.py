"""A worker that is slower than the others, in what it computes or for its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cluster import run_workers

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "workers" / "stragglers.py"
CASES: dict[str, dict[str, Any]] = {
    "bare": {"case": "none", "slow": -1, "windows": 12, "is_watched": False},
    "balanced": {"case": "none", "slow": -1, "windows": 12},
    "wandering": {"case": "wandering", "slow": -1, "windows": 16},
    "compute": {"case": "compute", "slow": 1, "windows": 8},
    "compute of the chief": {"case": "compute", "slow": 0, "windows": 8},
    "input": {"case": "input", "slow": 1, "windows": 8},
}


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each worker has to say."""
    ended = run_workers([str(SCRIPT), json.dumps(CASES)], request.param, timeout_s=240)
    outputs = "\n".join(each.output for each in ended)
    assert [each.returncode for each in ended] == [0] * request.param, outputs
    lines = [line for each in ended for line in each.output.splitlines() if "FOUND " in line]
    return [json.loads(line.partition("FOUND ")[2]) for line in lines]


@pytest.mark.parametrize(
    ("case", "cause", "worker"),
    [
        ("compute", "compute", 1),
        ("compute of the chief", "compute", 0),
        ("input", "input", 1),
    ],
)
def test_slow_worker(case: str, cause: str, worker: int, found: list[dict[str, Any]]) -> None:
    """It is named, with what takes it longer, and nobody else; the chief tells."""
    for each in found[1:]:
        assert each[case]["found"] == []
    [told] = found[0][case]["found"]
    assert (told["cause"], told["worker"], told["is_over"]) == (cause, worker, False)
    assert told["replica"] == (worker if cause == "compute" else None)
    assert told["score"] < 0.75
    assert f"worker-{worker} on " in told["told"]


@pytest.mark.parametrize("case", ["balanced", "wandering"])
def test_nobody(case: str, found: list[dict[str, Any]]) -> None:
    """Where all are alike, or each is slow for a while, nobody is named."""
    assert [each[case]["found"] for each in found] == [[]] * len(found)


def test_same_bits(found: list[dict[str, Any]]) -> None:
    """To take times changes not a bit."""
    for each in found:
        bare, watched = each["bare"], each["balanced"]
        assert (watched["bits"], watched["history"]) == (bare["bits"], bare["history"])
