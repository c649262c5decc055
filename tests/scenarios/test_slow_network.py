"""A worker whose network becomes slow."""

from __future__ import annotations

import json

import pytest
from scenarios.test_stragglers_of_workers import SCRIPT
from support.cluster import run_workers
from support.networks import hosts

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.cluster

CASES = {"network": {"case": "network", "slow": 1, "windows": 14}}


@pytest.mark.parametrize("workers", [2, 3])
def test_slow_network(workers: int) -> None:
    """It is named, with its network, and nobody else, though all compute and read alike."""
    with hosts(workers) as places:
        command = [str(SCRIPT), json.dumps(CASES)]
        ended = run_workers(command, workers, hosts=places, timeout_s=240)
    outputs = "\n".join(each.output for each in ended)
    assert [each.returncode for each in ended] == [0] * workers, outputs
    [line] = [line for line in ended[0].output.splitlines() if "FOUND " in line]
    found = json.loads(line.partition("FOUND ")[2])["network"]["found"]
    assert [(each["cause"], each["worker"]) for each in found] == [("network", 1)], outputs
