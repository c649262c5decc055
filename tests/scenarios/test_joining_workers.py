"""Real processes without a supervisor that form a cluster, or fail to."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from support.cluster import environment, free_ports, run_workers
from support.processes import Process

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "workers" / "joining.py"


@pytest.mark.parametrize("ways", [("init", "own"), ("own", "init")], ids=str)
def test_different_ways(ways: tuple[str, str]) -> None:
    """TensorFlow connects workers that have met through `kd.init()` with others that have not."""
    for ended in run_workers([str(SCRIPT), *ways], 2, timeout_s=200):
        assert ended.returncode == 0, ended.output
        assert "built" in ended.output


@pytest.mark.parametrize("way", ["early", "joined"])
@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_a_script(failing: int, way: str) -> None:
    """A worker that raises before `fit` ends the other one, which reports its name and error."""
    ways = ["init", "init"]
    ways[failing] = way
    ended = run_workers([str(SCRIPT), *ways], 2, timeout_s=100)
    assert ended[failing].returncode == 1, ended[failing].output
    other = ended[1 - failing]
    assert other.returncode == 201, other.output
    last = other.output.rpartition("PeerLostError: ")[2]
    assert f"worker-{failing} (" in last
    assert "ValueError: no data in " in last


@pytest.mark.parametrize("task", ["worker", "chief"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_signals_end_the_wait(task: str, number: signal.Signals) -> None:
    """A signal ends a chief that waits for its worker or its parameter server."""
    other = "ps" if task == "chief" else None
    names = ["chief", "worker", other] if other else ["worker", "worker"]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(names))]
    cluster: dict[str, list[str]] = {}
    for name, address in zip(names, addresses, strict=True):
        cluster.setdefault(str(name), []).append(address)
    config = json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}})
    env = environment({"TF_CONFIG": config})
    missing = f"ps-0 ({addresses[2]})" if other else f"worker-1 ({addresses[1]})"
    with Process([str(SCRIPT), "init"], env) as process:
        end_s = time.monotonic() + 60
        while f"is waiting for {missing} to join" not in process.output():
            assert process.poll() is None, process.output()
            assert time.monotonic() < end_s
            time.sleep(0.05)
        process.send_signal(number)
        code = process.wait(30)
    assert code in (-number, 1)
