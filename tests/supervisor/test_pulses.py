"""Signs of life, with a clock that the test controls."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervision import await_until

from keras_distplug.core.supervised import Supervised
from keras_distplug.supervisor.pulses import Pulses

_PTRACE_SEIZE = 0x4206


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "100"]) as process:
        state = Path(f"/proc/{process.pid}/status")
        await_until(lambda: "S (sleeping)" in state.read_text(), "it sleeps")
        yield process.pid
        process.kill()


def beat(contract: Supervised, pid: int, at: float) -> None:
    pulse = contract.pulse_file("w")
    pulse.write_text(str(pid))
    os.utime(pulse, (at, at))


def test_silence(tmp_path: Path, sleeper: int) -> None:
    """A worker is silent after the time limit without a sign of life.

    Every sign restarts the time, which does not start before the first one.
    """
    contract, clock = Supervised("j", 0, tmp_path), Clock()
    pulses = Pulses(contract, ["w"], 10.0, clock)

    def after(secs: float) -> dict[str, str]:
        found = pulses.look()
        for _ in range(round(secs / pulses.look_every_secs)):
            clock.now += pulses.look_every_secs
            found = pulses.look()
        return found

    assert after(99) == {}
    beat(contract, sleeper, 1.0)
    assert after(9) == {}
    beat(contract, sleeper, 2.0)
    assert after(9) == {}
    assert after(3) == {"w": "S (sleeping)"}
    beat(contract, sleeper, 3.0)
    assert after(9) == {}


def test_stopped_supervisor(tmp_path: Path, sleeper: int) -> None:
    """Time during which the supervisor was stopped does not count."""
    contract, clock = Supervised("j", 0, tmp_path), Clock()
    pulses = Pulses(contract, ["w"], 10.0, clock)
    beat(contract, sleeper, 1.0)
    pulses.look()
    clock.now += 1e6
    assert pulses.look() == {}


def test_exempt_processes(tmp_path: Path, sleeper: int) -> None:
    """A process that has exited, or that is traced, does not count as silent."""
    contract, clock = Supervised("j", 0, tmp_path), Clock()
    pulses = Pulses(contract, ["w"], 1.0, clock)
    with subprocess.Popen(["true"]) as gone:
        pass
    assert ctypes.CDLL(None).ptrace(_PTRACE_SEIZE, sleeper, None, None) == 0
    for pid in (gone.pid, sleeper):
        beat(contract, pid, float(pid))
        for _ in range(30):
            clock.now += pulses.look_every_secs
            assert pulses.look() == {}
