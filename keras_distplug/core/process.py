"""Identifies this process, and checks whether another one is still alive."""

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
    """Returns the start time of this process, in seconds since 1970.

    If the operating system does not provide it, returns the time this module was imported.
    """
    ticks, _ = _read_process(os.getpid()) or (None, "")
    try:
        with open("/proc/uptime", encoding="ascii") as file:
            up_s = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return _IMPORTED_AT
    # A forked process has inherited this module, and its import time, from its parent.
    return _IMPORTED_AT if ticks is None else time.time() - max(0.0, up_s - _seconds(ticks))


@dataclass(frozen=True)
class Process:
    """A process, described so that other processes can identify it.

    Args:
        host: Host name of its machine.
        pid: Process number.
        started_utc: Start time, ISO 8601.
        boot: Boot ID of its machine, different after every reboot; empty if unknown.
        namespace: PID namespace in which `pid` is valid: every container has its own.
        ticks: Start time in clock ticks since the machine booted; -1 if unknown.
        pod: Kubernetes pod and container name; empty outside Kubernetes.
        job: Job of the supervisor or scheduler that started it; empty without one.
        attempt: Number of this start within the job.
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
    """Returns the description of this process.

    Args:
        environ: Environment variables. Defaults to `os.environ`.
        mounts: Mount table in the format of Linux. Defaults to the content of
            `/proc/self/mountinfo`.
    """
    started = datetime.datetime.fromtimestamp(started_at(), datetime.UTC)
    ticks, _ = _read_process(os.getpid()) or (-1, "")
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
    job, attempt = _read_job(environ)
    return Process(
        host=host,
        pid=os.getpid(),
        started_utc=started.isoformat(timespec="seconds"),
        boot=boot,
        namespace=namespace,
        ticks=ticks,
        pod=_parse_pod(mounts),
        job=job,
        attempt=attempt,
    )


def is_alive(process: Process, here: Process) -> bool | None:
    """Returns True if `process` is alive, False if it is not, None if that is unknown here.

    Args:
        process: The process in question.
        here: The calling process.
    """
    if process.job and process.job == here.job and process.attempt < here.attempt:
        return False  # its scheduler has ended it
    if not process.boot or process.boot != here.boot:
        return None
    if process.namespace != here.namespace:
        # Kubernetes restarts a container only after it has exited.
        return False if process.pod and process.pod == here.pod else None
    found = _read_process(process.pid)
    if found is None:
        return None if _exists(process.pid) else False  # another user's may be hidden
    ticks, state = found
    if ticks != process.ticks or state in "ZX":
        return False
    return None if state in "Tt" else True  # stopped: it may never be continued


def _parse_pod(mounts: str) -> str:
    """Returns "pod/container", from the path of the termination-log file the kubelet mounts."""
    found = _POD.search(mounts)
    return "/".join(found.groups()) if found else ""


def _read_job(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the job that started this process, and the number of this start."""
    if JOB in environ:
        return environ[JOB], int(environ.get(ATTEMPT, "0"))
    if "SLURM_JOB_ID" in environ:
        restarts = environ.get("SLURM_RESTART_COUNT", "0")
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        number = int(restarts) if restarts.isdecimal() else 0
        return f"Slurm job {environ['SLURM_JOB_ID']} of {cluster}", number
    return "", 0


def _read_process(pid: int) -> tuple[int, str] | None:
    """Returns a local process's start time in ticks, and its state; None if it is not visible."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The program's name, in parentheses, may contain spaces.
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
