"""Runs real worker processes on this machine, with a timeout."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from support.processes import Process

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """The result of a process."""

    returncode: int
    output: str


@dataclass(frozen=True)
class Host:
    """The host of a worker.

    Args:
        address: Address at which the others reach it.
        prefix: Start of a command that runs on this host.
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
    """Returns this process's environment without a cluster, and with the package importable."""
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
    is_forked: bool = True,
    timeout_s: float,
) -> list[Ended]:
    """Runs `command` once per worker with a new TF_CONFIG (none for a single worker).

    After `timeout_s`, all processes are killed, and the calling test fails.
    """
    ports = free_ports(workers)
    hosts = [Host()] * workers if hosts is None else hosts
    addresses = [host.address for host in hosts]
    cluster = {"worker": [f"{a}:{port}" for a, port in zip(addresses, ports, strict=True)]}
    with ExitStack() as stack:
        processes = []
        for index, host in enumerate(hosts):
            own = environment(env)
            if workers > 1:
                task = {"type": "worker", "index": index}
                own["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
            process = Process(command, own, cwd=cwd, prefix=host.prefix, is_forked=is_forked)
            processes.append(stack.enter_context(process))
        end_s = time.monotonic() + timeout_s
        codes = [process.wait(end_s - time.monotonic()) for process in processes]
        return [Ended(code, each.output()) for code, each in zip(codes, processes, strict=True)]


def run_job(
    command: Sequence[str],
    workers: int,
    *options: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    is_forked: bool = True,
    timeout_s: float,
) -> Ended:
    """Runs `command` on workers that `keras-distplug run` starts and restarts.

    After `timeout_s`, all processes are killed, and the calling test fails.
    """
    # If it is forked itself, it forks its workers as well, including the first ones.
    script = [str(ROOT / "tests" / "support" / "supervised.py")]
    run = [*(script if is_forked else ["-m", "keras_distplug"]), "run", "--workers", str(workers)]
    command = [*run, *options, "--", sys.executable, *command]
    with Process(command, environment(env), cwd=cwd, is_forked=is_forked) as process:
        return Ended(process.wait(timeout_s), process.output())
