"""Starts real worker processes on this machine and waits for them, with a time-out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    returncode: int
    output: str


@dataclass(frozen=True)
class Host:
    """Where a worker runs.

    Args:
        address: That the others reach it at.
        prefix: What a command begins with to run there.
    """

    address: str = "127.0.0.1"
    prefix: Sequence[str] = ()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without any cluster in it, with the package importable."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("TF_CONFIG", "SLURM_", "KERAS_"))
    }
    paths = [str(ROOT), str(ROOT / "tests"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1", PYTHONUNBUFFERED="1")
    return env | dict(extra or {})


def run_workers(
    command: Sequence[str],
    workers: int,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    hosts: Sequence[Host] | None = None,
    timeout_s: float,
) -> list[Ended]:
    """Runs `command` once per worker with a fresh TF_CONFIG (none for a single worker).

    All processes are killed when `timeout_s` is over, which fails the test that called.
    """
    ports = free_ports(workers)
    hosts = [Host()] * workers if hosts is None else hosts
    addresses = [host.address for host in hosts]
    cluster = {"worker": [f"{a}:{port}" for a, port in zip(addresses, ports, strict=True)]}
    processes = []
    for index in range(workers):
        own = environment(env)
        if workers > 1:
            task = {"type": "worker", "index": index}
            own["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        processes.append(
            subprocess.Popen(
                [*hosts[index].prefix, sys.executable, *command],
                env=own,
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        ended = []
        for process in processes:
            output, _ = process.communicate(timeout=timeout_s)
            ended.append(Ended(process.returncode, output))
        return ended
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def run_job(
    command: Sequence[str],
    workers: int,
    *options: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float,
) -> Ended:
    """Runs `command` on workers that `keras-distplug run` starts, and starts again.

    When `timeout_s` is over, all processes are killed, which fails the test that called.
    """
    run = ["-m", "keras_distplug", "run", "--workers", str(workers), *options, "--"]
    done = subprocess.run(
        [sys.executable, *run, sys.executable, *command],
        env=environment(env),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return Ended(done.returncode, done.stdout)
