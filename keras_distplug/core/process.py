"""Processes: this one, and whether another one is still alive."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from keras_distplug.core.supervised import ATTEMPT, JOB

_IMPORTED_AT = time.time()
_POD = re.compile(r"/pods/([0-9a-f-]{36})/containers/([^/\s]+)/")


def started_at() -> float:
    """Returns when this process started, in seconds since 1970, or when this module was imported
    if the operating system doesn't say."""
    ticks, _ = _look_at(os.getpid()) or (None, "")
    try:
        with open("/proc/uptime", encoding="ascii") as file:
            up_s = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return _IMPORTED_AT
    # A forked process has not imported this itself.
    return _IMPORTED_AT if ticks is None else time.time() - max(0.0, up_s - _seconds(ticks))


@dataclass(frozen=True)
class Process:
    """A process, as others can find it again.

    Args:
        host: The name of its machine.
        pid: Its number there.
        started_utc: When it started, ISO 8601.
        boot: Different for every machine, and every time one is booted; empty if unknown.
        namespace: In which its number counts: containers have their own.
        ticks: When it started, in ticks since its machine was booted; -1 if unknown.
        pod: Its Kubernetes pod and its container's name there; empty if it is in none.
        job: What a supervisor or scheduler started it for; empty if none did.
        attempt: The number of that start.
    """

    host: str
    pid: int
    started_utc: str
    boot: str
    namespace: str
    ticks: int
    pod: str
    job: str
    attempt: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (started {self.started_utc})"


def this_process(environ: Mapping[str, str] = os.environ, mounts: str | None = None) -> Process:
    """Returns what others need to know of this process.

    Args:
        environ: Its environment.
        mounts: What Linux says of its mounts. Defaults to `/proc/self/mountinfo`.
    """
    started = datetime.datetime.fromtimestamp(started_at(), datetime.UTC)
    ticks, _ = _look_at(os.getpid()) or (-1, "")
    boot, namespace = "", ""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    if mounts is None:
        mounts = ""
        with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as file:
            mounts = file.read()
    host = socket.gethostname()
    job, attempt = _job_in(environ)
    return Process(
        host=host,
        pid=os.getpid(),
        started_utc=started.isoformat(timespec="seconds"),
        boot=boot,
        namespace=namespace,
        ticks=ticks,
        pod=_pod_in(mounts),
        job=job,
        attempt=attempt,
    )


def is_alive(process: Process, here: Process) -> bool | None:
    """Returns whether a process is alive; None if that cannot be seen from here.

    Args:
        process: The process.
        here: This one.
    """
    if process.job and process.job == here.job and process.attempt < here.attempt:
        return False  # its scheduler has ended it
    if not process.boot or process.boot != here.boot:
        return None
    if process.namespace != here.namespace:
        # Kubernetes starts a container again once it has ended.
        return False if process.pod and process.pod == here.pod else None
    found = _look_at(process.pid)
    if found is None:
        return None if _exists(process.pid) else False  # it may be another user's, and hidden
    ticks, state = found
    if ticks != process.ticks or state in "ZX":
        return False
    return None if state in "Tt" else True  # stopped: it may never be continued


def _pod_in(mounts: str) -> str:
    """The pod, and the container's name in it, from the file that the kubelet mounts there for
    the container's last words."""
    found = _POD.search(mounts)
    return "/".join(found.groups()) if found else ""


def _job_in(environ: Mapping[str, str]) -> tuple[str, int]:
    """The job that this process was started for, and the number of that start."""
    if JOB in environ:
        return environ[JOB], int(environ.get(ATTEMPT, "0"))
    if "SLURM_JOB_ID" in environ:
        restarts = environ.get("SLURM_RESTART_COUNT", "0")
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        number = int(restarts) if restarts.isdecimal() else 0
        return f"Slurm job {environ['SLURM_JOB_ID']} of {cluster}", number
    return "", 0


def _look_at(pid: int) -> tuple[int, str] | None:
    """When a process of this machine started, in ticks, and its state; None if it isn't seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The name of the program, in brackets, may contain spaces.
            fields = file.read().rpartition(")")[2].split()
        return int(fields[19]), fields[0]
    except (OSError, ValueError, IndexError):
        return None


def _seconds(ticks: int) -> float:
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
