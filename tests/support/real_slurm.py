"""Slurm with two nodes on this machine, each in a network namespace with its own address."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.cluster import ROOT, environment
from support.needed import missing
from support.networks import Machine, hosts

NODES = ("n0", "n1")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "nsenter", "unshare")
CONFIGURATION = """
ClusterName=t
SlurmctldHost={host}({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=30
MinJobAge=600
ReturnToService=2
JobRequeue=1
MpiDefault=none
SwitchType=switch/none
NodeName=n0 NodeHostname={host} NodeAddr={addresses[0]} Port=17818 CPUs=16 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr={addresses[1]} Port=17819 CPUs=16 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class Slurm:
    """Two nodes and their controller.

    Args:
        folder: Folder for all of its files.
        machines: One machine per node, and one for the controller.
    """

    def __init__(self, folder: Path, machines: list[Machine]) -> None:
        self._folder = folder
        self._nodes = dict(zip(NODES, machines, strict=False))
        self._control = machines[-1]
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        addresses = [machine.address for machine in machines]
        (folder / "hosts").write_text(
            Path("/etc/hosts").read_text()
            + "".join(f"\n{a} {n}" for a, n in zip(addresses, NODES, strict=False))
        )
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                control=self._control.address,
                addresses=addresses,
                folder=folder,
            )
        )
        (folder / "munge" / "key").write_bytes(os.urandom(1024))
        (folder / "munge" / "key").chmod(0o400)
        (folder / "munge").chmod(0o700)

    def start(self) -> None:
        munge = self._folder / "munge"
        files = {"key": "key-file", "sock": "socket", "pid": "pid-file", "seed": "seed-file"}
        options = [f"--{option}={munge / name}" for name, option in files.items()]
        self._start(["munged", "--force", "--foreground", f"--log-file={munge / 'log'}", *options])
        self.await_(lambda: (munge / "sock").exists(), 20, "munged")
        self._start([*self._inside(self._control), "slurmctld", "-D"])
        for node in NODES:
            self.raise_node(node)
        self.await_(lambda: self.ask("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"], 60)

    def raise_node(self, node: str) -> None:
        """Starts or restarts a node."""
        self._nodes[node].mend()
        self._start([*self._inside(self._nodes[node]), "slurmd", "-D", "-N", node])

    def drop_node(self, node: str) -> None:
        """Simulates a power failure: all processes of the node and its link are gone."""
        self._nodes[node].cut()
        self._kill_all(self._nodes[node])

    def submit(self, script: Path, *options: str, cwd: Path, env: Mapping[str, str]) -> str:
        """Returns the number of the job."""
        command = ["sbatch", "--parsable", f"--output={cwd}/%j.out", *options, str(script)]
        return self.ask(*command, cwd=cwd, env=env).strip()

    def state(self, job: str) -> dict[str, str]:
        shown = self.ask("scontrol", "show", "job", "-o", job).splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def await_state(self, job: str, state: str, secs: float = 120, restarts: int = 0) -> None:
        """Waits until the job, restarted this many times by Slurm, is in a state."""

        def is_so() -> bool:
            found = self.state(job)
            return (found["JobState"], found["Restarts"]) == (state, str(restarts))

        self.await_(is_so, secs, lambda: f"{state} with {restarts} restarts: {self.state(job)}")

    def tries(self, *command: str) -> bool:
        """Returns True if Slurm accepts a request, which it may refuse for a short time."""
        command = (*self._inside(self._control), *command)
        done = subprocess.run(command, env=self._environ(None), capture_output=True, timeout=60)
        return done.returncode == 0

    def ask(
        self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        done = subprocess.run(
            [*self._inside(self._control), *command],
            env=self._environ(env),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def await_(
        self, happens: Callable[[], bool], secs: float, what: str | Callable[[], str] = ""
    ) -> None:
        end_s = time.monotonic() + secs
        while not happens():
            assert time.monotonic() < end_s, what if isinstance(what, str) else what()
            time.sleep(0.1)

    def stop(self) -> None:
        for machine in (*self._nodes.values(), self._control):
            self._kill_all(machine)
        for daemon in self._daemons:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait(30)

    def _start(self, command: list[str]) -> None:
        with (self._folder / "log").open("ab") as log:
            daemon = subprocess.Popen(
                command,
                env=self._environ(None),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def _environ(self, env: Mapping[str, str] | None) -> dict[str, str]:
        paths = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
        return {"PATH": paths, **(env or {}), "SLURM_CONF": str(self._folder / "slurm.conf")}

    def _inside(self, machine: Machine) -> list[str]:
        """Returns the start of a command that runs on a machine and knows the names of all
        nodes."""
        # `ip netns exec` would hide /sys/fs/cgroup.
        space = machine.prefix[-1]
        names = f"mount --bind '{self._folder}/hosts' /etc/hosts && exec \"$@\""
        enter = ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount"]
        return [*enter, "bash", "-c", names, "_"]

    @staticmethod
    def _kill_all(machine: Machine) -> None:
        while True:
            command = ["ip", "netns", "pids", machine.prefix[-1]]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            pids = done.stdout.split()
            if not pids:
                return
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Skips the test if Slurm's programs are not installed."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if absent:
        missing(", ".join(absent), "Run apt install slurm-wlm munge.")
    with ExitStack() as stack:
        made = Slurm(folder, stack.enter_context(hosts(3)))
        stack.callback(made.stop)
        made.start()
        yield made


def job_environment(python: Path) -> dict[str, str]:
    """Returns the job's environment from `sbatch`: `python` is the one in this folder."""
    env = environment()
    return env | {"PATH": f"{python}:{env['PATH']}", "ROOT": str(ROOT)}
