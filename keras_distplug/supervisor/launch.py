"""What each worker of one attempt is started with: its place in the cluster, ports, devices."""

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

MEMBER = "KERAS_DISTPLUG_MEMBER"  # tells what one worker has started from what others have


def free_ports(count: int, avoid: Collection[int] = ()) -> tuple[int, ...]:
    """Ports of 127.0.0.1 that nobody listens on.

    All are held until the last is chosen, so that none comes twice. Between this and the worker's
    own `bind` another process may still take one: the attempt then fails and the next has others.

    Args:
        count: How many.
        avoid: Ports not to return, such as those of the attempt before, whose connections may
            linger.
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
    """A worker for each port; a single process when there is only one.

    A TF_CONFIG of one worker would make TensorFlow form a cluster of one, with a server that
    nobody needs.

    Args:
        ports: Of the processes.
        ps: How many of them are parameter servers, the last ones. The first is then the chief.
    """
    at = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"worker": tuple(at)} if len(at) > 1 else {}
    if ps:
        cluster = {"chief": (at[0],), "worker": tuple(at[1:-ps]), "ps": tuple(at[-ps:])}
        places = [(task, place) for task, of in cluster.items() for place in range(len(of))]
        return [Role(task, place, cluster, "supervisor") for task, place in places]
    return [Role("worker", index, cluster, "supervisor") for index in range(len(ports))]


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that workers may be given, as `CUDA_VISIBLE_DEVICES` names them.

    Empty when there are none, or when the user has hidden them (`CUDA_VISIBLE_DEVICES=""`).
    Not verified on GPU.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        # CUDA counts from 0 whatever the numbers of the device files in this container are.
        files = [entry for entry in devices.iterdir() if re.fullmatch(r"nvidia\d+", entry.name)]
        return tuple(str(index) for index in range(len(files)))
    names = map(str.strip, named.split(","))
    # CUDA ignores everything from the first invalid entry on; "-1" is the usual one.
    return tuple(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def divide_gpus(
    gpus: Sequence[str], workers: int, per_worker: int | None
) -> list[tuple[str, ...]] | None:
    """Gives each worker its own GPUs; not verified on GPU.

    Args:
        gpus: From `visible_gpus`.
        workers: How many workers share them.
        per_worker: GPUs for each; None for equal shares, where a remainder stays unused.

    Returns:
        The GPUs of each worker, or None when there are no GPUs to give.
    """
    if not gpus:
        return None
    share = len(gpus) // workers if per_worker is None else per_worker
    if share == 0 or share * workers > len(gpus):
        wanted = "one each" if per_worker is None else f"{per_worker} each"
        raise ConfigurationError(
            f"{workers} workers with {wanted} need {max(share, 1) * workers} GPUs. "
            f"Received {len(gpus)}: {','.join(gpus)}. Start fewer workers, or set "
            "CUDA_VISIBLE_DEVICES='' to train on CPUs."
        )
    return [tuple(gpus[worker * share : (worker + 1) * share]) for worker in range(workers)]


def refuse_foreign_cluster(environ: Mapping[str, str]) -> None:
    """A scheduler that starts the workers itself would get as many jobs as it has tasks."""
    role = from_environment(environ)
    tasks = sum(map(len, role.cluster.values()))
    if tasks > 1:
        raise ConfigurationError(
            f"{role.source} says that this process is {role.name} of {tasks}: a "
            "scheduler starts the workers here. Let it start the script itself (`python train.py`)"
            f", or unset {VARIABLES[role.source]} to run a local group."
        )


def common_environment(base: Mapping[str, str]) -> dict[str, str]:
    """What all workers, and their fork server, have in their environment.

    Args:
        base: The supervisor's own, usually `os.environ`.
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
    """The environment of one process.

    A chief and parameter servers compute little: the devices are the workers'.

    Args:
        common: What all processes have.
        role: The process's place; without a cluster it has no TF_CONFIG.
        contract: What it reports to.
        gpus: Those of each worker; None leaves `CUDA_VISIBLE_DEVICES` as it is.
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
    """The command to supervise is no program."""


def check_command(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuses a command that cannot start, before anything else is started."""
    name = command[0]
    if shutil.which(name, path=environ.get("PATH", os.defpath)):
        return
    if name.endswith(".py"):
        hint = f"Write `-- python {name}`: a script needs its interpreter."
    elif Path(name).is_file():
        hint = f"The file exists but is not executable: `chmod +x {name}`, or name its interpreter."
    else:
        hint = (
            "Expected a program on PATH or the path of an executable file. The interpreter of this "
            f"command is {sys.executable}."
        )
    raise CommandNotFoundError(f"The command {name!r} cannot be started. {hint}")


class Handle(Protocol):
    """A child process, as `subprocess.Popen` gives it."""

    pid: int
    stdout: IO[bytes] | None

    def wait(self) -> int: ...


@dataclass(frozen=True)
class Started:
    """A process that is a worker.

    Args:
        handle: Of the command.
        mark: What it, and whatever it starts, has in its environment.
    """

    handle: Handle
    mark: str


def spawn(command: Sequence[str], environ: Mapping[str, str]) -> Started:
    """Starts one worker in a session of its own, its output merged into one pipe, without input."""
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
            f"The command {command[0]!r} cannot be started: {error.strerror}. Expected an "
            "executable; a script needs a first line such as `#!/usr/bin/env python` or its "
            f"interpreter: `-- python {command[0]}`."
        ) from error
    started = Started(handle, f"{MEMBER}={name}")
    guard.note_worker(handle.pid, started.mark)
    return started
