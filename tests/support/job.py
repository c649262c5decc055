"""Starts the processes of a job with parameter servers, like a scheduler."""

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
    """The processes of a job by task. A context manager that kills all of them on exit.

    Args:
        folder: Folder for their output.
        command: Arguments of Python, the same for all.
        workers: Number of workers, in addition to the chief and the parameter servers.
        env: Environment of all processes.
        servers: Number of parameter servers.
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
            assert chief.poll() is None, (
                f"the chief has ended with {chief.poll()}:\n{self.output_ends()}"
            )
            assert time.monotonic() < end_s, f"nothing has happened:\n{self.output_ends()}"
            time.sleep(0.05)

    def output_ends(self) -> str:
        """Returns the end of every process's output, for error messages."""
        files = [self.output(*task) for task in self.tasks]
        return "\n".join(f"== {file.stem}\n{file.read_text()[-3000:]}" for file in files)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.end()
