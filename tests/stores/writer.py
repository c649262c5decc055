"""A process that saves one checkpoint after another and reports its progress, until it is
killed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import stamina

from keras_distplug.core.errors import SaveError
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.store import CheckpointStore


class NoExchange:
    """The exchange of a writer without other workers."""

    def send(self, topic: str, text: str) -> None:
        return

    def receive(self, topic: str, timeout_s: float) -> str:
        raise AssertionError(topic)


def arrays(step: int, size: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint of `step`, of the given size."""
    return {"a": np.frombuffer(np.random.default_rng(step).bytes(size), np.uint8)}


class ReportingFiles:
    """Files that report their creation.

    Args:
        files: The wrapped files.
        said: Called with `"begin"` and `"end"` of every file.

    """

    def __init__(self, files: Files, said: Connection) -> None:
        self._files = files
        self._said = said

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        kind = "values" if path.endswith(".safetensors") else "manifest"
        self._said.send(("begin", kind))
        self._files.create(path, parts)
        self._said.send(("end", kind))


def save_on(
    url: str,
    options: Mapping[str, Any],
    run: str,
    size: int,
    steps: Iterable[int],
    said: Connection,
) -> None:
    """Saves `steps`, of `size` bytes each, and reports starts, ends, commits and failures to
    `said`. After a failure, it tries the next step, as training does."""
    stamina.set_active(False)
    files: Any = ReportingFiles(open_files(url, options), said)
    writer = Writer(files, CheckpointStore(files, run), Team(0, 1, NoExchange()))
    for step in steps:
        state = TrainState(Cursor(0, 0, step), arrays(step, size))
        try:
            writer.save(state, Writer.new_attempt())
        except SaveError:
            said.send(("failed", step))
        else:
            said.send(("saved", step))
