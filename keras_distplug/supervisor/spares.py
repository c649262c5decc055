"""Processes that have run the script up to `import keras_distplug`, and wait to become workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from keras_distplug.cluster.spare import Part
from keras_distplug.core.supervised import SPARE, WARM_UP, Supervised
from keras_distplug.supervisor import guard
from keras_distplug.supervisor.launch import Started, spawn

_NO_ATTEMPT = -1
_WORDS = 300  # of what a spare has printed last


@dataclass(frozen=True)
class _Spare:
    started: Started
    environ: Mapping[str, str]
    pipe: Path


class Spares:
    """Starts workers, from spares where there are some. A context manager: ends what is left.

    Args:
        command: What every worker runs.
        environ: What a worker's environment is made from.
        job: The job's name.
        folder: Where the pipes are to which spares listen.
        has_gpus: Whether each worker has its own, which a spare does not know.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        job: str,
        folder: Path,
        *,
        has_gpus: bool,
    ) -> None:
        self._command = command
        # Complete, for what the script starts before it has a part.
        self._environ = {**environ, **Supervised(job, _NO_ATTEMPT, folder).to_env()}
        if not has_gpus:
            self._environ[WARM_UP] = "1"
        self._folder = folder
        self._spares: list[_Spare] = []
        self._told: list[str] = []
        self._open: list[int] = []

    def prepare(self, count: int) -> None:
        """Starts spares until there are so many. Does not wait until they are ready. To be called
        when all workers have begun."""
        self._close_pipes()
        self._discard_ended()
        while len(self._spares) < count:
            self._folder.mkdir(parents=True, exist_ok=True)  # something may have tidied up
            pipe = self._folder / uuid.uuid4().hex
            os.mkfifo(pipe)
            environ = {**self._environ, SPARE: str(pipe)}
            self._spares.append(_Spare(spawn(self._command, environ), environ, pipe))

    def start(self, environ: Mapping[str, str]) -> tuple[Started, bool]:
        """Starts a worker.

        Args:
            environ: Its environment.

        Returns:
            Its process, and whether that was a spare.
        """
        self._discard_ended()
        if not self._spares:
            return spawn(self._command, environ), False
        spare = self._spares.pop(0)
        self._send(Part.between(spare.environ, environ), spare.pipe)
        return spare.started, True

    def ended(self) -> list[str]:
        """What there is to say of spares that have ended by themselves since it was last asked."""
        told, self._told = self._told, []
        return told

    def _discard_ended(self) -> None:
        gone = [each for each in self._spares if each.started.handle.poll() is not None]
        self._spares = [each for each in self._spares if each not in gone]
        self._told += [_discard(each) for each in gone]

    def _send(self, part: Part, pipe: Path) -> None:
        """Does not wait for one that has not come to listen yet: the pipe keeps its part for as
        long as it is open."""
        file = os.open(pipe, os.O_RDWR)  # which opens at once
        self._open.append(file)
        os.write(file, part.to_line())

    def _close_pipes(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard.signal_all([each.started.mark for each in self._spares], signal.SIGKILL)
        for spare in self._spares:
            _discard(spare)
        self._spares = []
        self._close_pipes()


def _discard(spare: _Spare) -> str:
    """Tidies up behind a spare that is dead, or has been killed."""
    guard.signal_all([spare.started.mark], signal.SIGKILL)  # what it has started
    handle = spare.started.handle
    assert handle.stdout is not None
    os.set_blocking(handle.stdout.fileno(), False)
    with handle.stdout as pipe:
        printed = (pipe.read() or b"").decode(errors="replace").strip()
    with contextlib.suppress(subprocess.TimeoutExpired):
        handle.wait(5)
    spare.pipe.unlink(missing_ok=True)
    last = f": {printed[-_WORDS:]}" if printed else ""
    return f"a spare has ended with code {handle.returncode} before it was needed{last}"
