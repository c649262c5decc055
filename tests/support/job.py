"""Starts the processes of a job with parameter servers, as a scheduler would."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.cluster import environment, free_ports
from support.processes import Process

Task = tuple[str, int]


class Job:
    """Its processes by task, and what they print. To be used as a context, which ends all.

    Args:
        folder: For what they print.
        command: Of Python, the same for all.
        workers: How many there are, beside the chief and the parameter servers.
        env: Of all of them.
        servers: How many parameter servers there are.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        workers: int,
        env: Mapping[str, str],
        servers: int = 1,
    ) -> None:
        self._folder, self._command, self._env = folder, list(command), dict(env)
        addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + servers + workers)]
        self.cluster = {
            "chief": addresses[:1],
            "worker": addresses[1 + servers :],
            "ps": addresses[1 : 1 + servers],
        }
        self.processes: dict[Task, Process] = {}
        for task in self.tasks:
            self.start(*task)

    @property
    def tasks(self) -> list[Task]:
        return [(kind, n) for kind, those in self.cluster.items() for n in range(len(those))]

    def start(self, kind: str, index: int) -> None:
        config = {"cluster": self.cluster, "task": {"type": kind, "index": index}}
        environ = environment({**self._env, "TF_CONFIG": json.dumps(config)})
        output = self.output(kind, index)
        self.processes[kind, index] = Process(self._command, environ, output=output)

    def output(self, kind: str, index: int) -> Path:
        return self._folder / f"{kind}-{index}.out"

    def kill(self, kind: str, index: int, number: int = signal.SIGKILL) -> None:
        process = self.processes[kind, index]
        assert process.poll() is None, f"{kind}-{index} has ended before it was killed"
        process.send_signal(number)

    def wait(self, kind: str, index: int, timeout_s: float) -> int:
        return self.processes[kind, index].wait(timeout_s)

    def await_(self, happens: Callable[[], object], timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not happens():
            chief = self.processes["chief", 0]
            assert chief.poll() is None, f"the chief has ended with {chief.poll()}:\n{self.told()}"
            assert time.monotonic() < end_s, f"nothing has happened:\n{self.told()}"
            time.sleep(0.05)

    def told(self) -> str:
        """The end of what each has printed, for errors."""
        files = [self.output(*task) for task in self.tasks]
        return "\n".join(f"== {file.stem}\n{file.read_text()[-3000:]}" for file in files)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.end()
