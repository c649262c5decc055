"""Helpers for tests that run the real command."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

# Under a supervisor, importing the package forms a TensorFlow cluster; these workers have none.
job = os.environ.pop("KERAS_DISTPLUG_JOB")
from keras_distplug.core.supervised import Phase, Supervised
os.environ["KERAS_DISTPLUG_JOB"] = job

contract = Supervised.from_env()
tf_config = json.loads(os.environ.get("TF_CONFIG", "{}"))
task, index = tf_config["task"].values() if tf_config else ("worker", 0)
attempt, name = contract.attempt, f"{task}-{index}"

def mark(text):
    with open(Path(__file__).with_name("marks"), "a") as file:
        file.write(f"{text}\\n")

def train():
    for phase in (Phase.JOINED, Phase.FITTING, Phase.TRAINING):
        contract.report(name, phase)

def serve():
    contract.report(name, Phase.JOINED)
    sleep()

def complete():
    contract.report(name, Phase.COMPLETED)

def sleep():
    time.sleep(60)
    mark(f"{name} woke up")

def await_training(*others):
    deadline = time.monotonic() + 20
    while any(contract.read(other) is None for other in others) and time.monotonic() < deadline:
        time.sleep(0.01)

def await_marks(text, count=1):
    path, deadline = Path(__file__).with_name("marks"), time.monotonic() + 20
    while not path.exists() or path.read_text().count(text) < count:
        assert time.monotonic() < deadline, f"not marked {count} times: {text}"
        time.sleep(0.01)
"""


def environment(**changes: str) -> dict[str, str]:
    """Returns this environment without variables that change the output, but with the package."""
    hidden = ("TF_CONFIG", "NO_COLOR", "FORCE_COLOR", "CUDA_VISIBLE_DEVICES")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and not name.startswith(("SLURM_", "KERAS_DISTPLUG_"))
    }
    path = environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)
    return environ | changes


def await_until(condition: Callable[[], bool], what: str, secs: float = 20.0) -> None:
    """Fails the test unless `condition` comes true in time."""
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline, f"not within {secs} s: {what}"
        time.sleep(0.02)


def is_dead(pid: int) -> bool:
    """Returns True also for a zombie: in a container, orphans may never be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_stopped(pid: int) -> bool:
    """Returns True once all threads of a process are stopped by SIGSTOP."""
    states = [
        path.read_text().rpartition(")")[2].split()[0]
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) == {"T"}


@dataclass
class Supervision:
    """A `keras-distplug run` in its own folder."""

    folder: Path
    process: subprocess.Popen[str]

    def marks(self) -> list[str]:
        """Returns the lines that the workers have recorded, in order."""
        path = self.folder / "marks"
        return path.read_text().splitlines() if path.exists() else []

    def pids(self, count: int) -> list[int]:
        """Waits until the workers have recorded `count` PIDs, and returns them."""
        await_until(lambda: len(self.marks()) >= count, f"{count} pids marked")
        return [int(mark) for mark in self.marks()]

    def read_until(self, text: str) -> str:
        """Waits for a line with `text`. Returns the output since the last call."""
        assert self.process.stdout is not None
        lines: list[str] = []
        while text not in "".join(lines[-1:]):
            lines.append(self.process.stdout.readline())
            assert lines[-1], f"ended without {text!r}: {''.join(lines)}"
        return "".join(lines)

    def finish(self) -> tuple[int, str]:
        """Returns the exit code and the whole output."""
        out, err = self.process.communicate(timeout=50)
        return self.process.returncode, out + err
