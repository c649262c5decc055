"""Prepares and starts the workers of an attempt: ports, roles, devices and environments."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Protocol

from keras_distplug.cluster.roles import VARIABLES, Role, from_environment
from keras_distplug.core import supervised
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.supervised import Supervised
from keras_distplug.supervisor import guard

MEMBER = "KERAS_DISTPLUG_MEMBER"  # identifies a worker and the processes that it starts


def free_ports(count: int, avoid: Collection[int] = ()) -> tuple[int, ...]:
    """Returns unused ports of 127.0.0.1.

    All are held until the last one is chosen, so that they are distinct. Before a worker binds its
    port, another process may still take it: the attempt then fails, and the next one uses others.

    Args:
        count: Number of ports.
        avoid: Ports not to return, such as those of the previous attempt, whose connections may
            linger. Defaults to none.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            holder = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            holder.bind(("127.0.0.1", 0))
            port = holder.getsockname()[1]
            if port not in avoid:
                ports.append(port)
    return tuple(ports)


def local_cluster(ports: Sequence[int], ps: int = 0) -> list[Role]:
    """Returns the roles of a local cluster, or of a single process without a cluster.

    With a TF_CONFIG of one worker, TensorFlow would form a cluster of one and start a needless
    server.

    Args:
        ports: Ports of the processes.
        ps: Number of parameter servers, which get the last ports; the first process is then the
            chief. Defaults to 0.
    """
    at = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"worker": tuple(at)} if len(at) > 1 else {}
    if ps:
        cluster = {"chief": (at[0],), "worker": tuple(at[1:-ps]), "ps": tuple(at[-ps:])}
        places = [(task, place) for task, of in cluster.items() for place in range(len(of))]
        return [Role(task, place, cluster, "supervisor") for task, place in places]
    return [Role("worker", index, cluster, "supervisor") for index in range(len(ports))]


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Returns the available GPUs, as named in `CUDA_VISIBLE_DEVICES`.

    Empty on a machine without GPUs, or if the user has hidden them (`CUDA_VISIBLE_DEVICES=""`). Not
    verified on GPU.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        # CUDA numbers from 0, whatever the numbers of the device files in this container.
        files = [entry for entry in devices.iterdir() if re.fullmatch(r"nvidia\d+", entry.name)]
        return tuple(str(index) for index in range(len(files)))
    names = map(str.strip, named.split(","))
    # CUDA ignores the first invalid entry, usually "-1", and everything after it.
    return tuple(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def divide_gpus(
    gpus: Sequence[str], workers: int, per_worker: int | None
) -> list[tuple[str, ...]] | None:
    """Divides the GPUs among the workers. Not verified on GPU.

    Args:
        gpus: GPUs, as returned by `visible_gpus`.
        workers: Number of workers.
        per_worker: Number of GPUs per worker; None for equal shares, without the remainder.

    Returns:
        The GPUs of every worker, or None on a machine without GPUs.

    Raises:
        ConfigurationError: If there are too few GPUs.
    """
    if not gpus:
        return None
    share = len(gpus) // workers if per_worker is None else per_worker
    if share == 0 or share * workers > len(gpus):
        needed = max(share, 1)
        raise ConfigurationError(
            f"Expected at least {needed * workers} GPUs (workers: {workers}, GPUs per worker: "
            f"{needed}). Received: {len(gpus)} ({','.join(gpus)}). Start fewer workers, "
            "lower --devices-per-worker if it is given, or set CUDA_VISIBLE_DEVICES='' to train on "
            "CPUs."
        )
    return [tuple(gpus[worker * share : (worker + 1) * share]) for worker in range(workers)]


def refuse_foreign_cluster(environ: Mapping[str, str]) -> None:
    """Refuses to run in a scheduler's task, because every task would start its own job.

    Raises:
        ConfigurationError: If the environment describes a cluster of several tasks.
    """
    role = from_environment(environ)
    tasks = sum(map(len, role.cluster.values()))
    if tasks > 1:
        raise ConfigurationError(
            f"{role.source} says that this process is {role.name}, one of {tasks} tasks, so the "
            "workers seem to be started by a scheduler already. Let it run the script directly "
            f"(`python train.py`), or unset {VARIABLES[role.source]} to start workers on this "
            "machine only."
        )


def common_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables shared by all workers and their fork server.

    Args:
        base: Environment of the supervisor, usually `os.environ`.
    """
    dropped = {"TF_CONFIG", supervised.DEVICES_PER_WORKER, supervised.JOINED_BY}
    dropped.add(supervised.FORK_SERVER)
    environ = {name: value for name, value in base.items() if name not in dropped}
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    environ["PYTHONUNBUFFERED"] = "1"
    return environ


def worker_environment(
    common: Mapping[str, str],
    role: Role,
    contract: Supervised,
    gpus: Sequence[Sequence[str]] | None = None,
) -> dict[str, str]:
    """Returns the environment of a process.

    Only workers get devices: a chief and parameter servers compute little.

    Args:
        common: Variables shared by all processes.
        role: Role of the process; without a cluster, it gets no TF_CONFIG.
        contract: Contract with the supervisor.
        gpus: GPUs of every worker. Defaults to None, which leaves `CUDA_VISIBLE_DEVICES` unchanged.
    """
    is_worker = role.task_type == "worker"
    if not is_worker:
        contract = replace(contract, devices_per_worker=None)
    environ = {**common, **contract.to_env()}
    if role.cluster:
        environ["TF_CONFIG"] = role.to_tf_config()
    if gpus is not None:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[role.index] if is_worker else ())
    return environ


class CommandNotFoundError(ConfigurationError):
    """The command to supervise is not an executable program."""


def check_command(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Checks that the command can be started.

    Raises:
        CommandNotFoundError: If it cannot.
    """
    name = command[0]
    if shutil.which(name, path=environ.get("PATH", os.defpath)):
        return
    if name.endswith(".py"):
        hint = f"Write `-- python {name}`: a script needs its interpreter."
    elif Path(name).is_file():
        hint = (
            "The file exists, but it is not executable, or its folder (such as `./`) is not given. "
            f"Run `chmod +x {name}` and give the folder, too, or write its interpreter before it."
        )
    else:
        hint = (
            "Expected a program on PATH or the path of an executable file. To run a script with "
            f"the Python of keras-distplug, write `-- {sys.executable} train.py`."
        )
    raise CommandNotFoundError(f"The command {name!r} cannot be started. {hint}")


class Handle(Protocol):
    """A child process, with the interface of `subprocess.Popen`."""

    pid: int
    stdout: IO[bytes] | None

    def wait(self) -> int: ...


@dataclass(frozen=True)
class Started:
    """A worker that has been started.

    Args:
        handle: Handle of its process.
        mark: Entry that identifies its environment, and those of the processes that it starts.
    """

    handle: Handle
    mark: str


def spawn(command: Sequence[str], environ: Mapping[str, str]) -> Started:
    """Starts a worker in its own session, without input, and with all output in one pipe."""
    name = uuid.uuid4().hex
    try:
        handle = subprocess.Popen(
            command,
            env={**environ, MEMBER: name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandNotFoundError(
            f"The command {command[0]!r} cannot be started: {error.strerror}. If it is a script, "
            "give it a first line such as `#!/usr/bin/env python`, or write its interpreter before "
            f"it: `-- python {command[0]}`."
        ) from error
    started = Started(handle, f"{MEMBER}={name}")
    guard.note_worker(handle.pid, started.mark)
    return started
