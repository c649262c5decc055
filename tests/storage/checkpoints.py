"""Saves and reads checkpoints in the way of a single-process training."""

from __future__ import annotations

from pathlib import Path

from keras_distplug.core.errors import AgreementError, CorruptCheckpointError
from keras_distplug.core.state import TrainState
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.files import Files
from keras_distplug.storage.layout import Kind
from keras_distplug.storage.ownership import Ownership
from keras_distplug.storage.retention import Retention
from keras_distplug.storage.store import CheckpointStore, Stored
from keras_distplug.storage.stores.local import LocalFiles

RUN = "run-0001"


class NoExchange:
    """An exchange without other workers."""

    def send(self, topic: str, text: str) -> None:
        return

    def receive(self, topic: str, timeout_s: float) -> str:
        raise AgreementError(topic)


class Checkpoints(CheckpointStore):
    """A run's checkpoints, which can be added to.

    Args:
        files: The folder that contains the run's folder, or its path.
        owned: The ownership of the directory.

    """

    def __init__(
        self,
        files: Files | Path,
        keep_last: int = 2,
        run: str = RUN,
        owned: Ownership | None = None,
        **rules: object,
    ) -> None:
        files = LocalFiles(files) if isinstance(files, Path) else files
        super().__init__(files, run, Retention(keep_last, **rules))  # type: ignore[arg-type]
        self._writer = Writer(files, self, Team(rank=0, size=1, exchange=NoExchange()), owned)

    def newest(self, kind: Kind) -> Stored | None:
        """Returns the newest intact checkpoint; damaged ones are quarantined."""
        while (stored := super().newest(kind)) is not None:
            try:
                self.verify(stored.name)
            except CorruptCheckpointError as error:
                self.quarantine(stored.name, error)
            else:
                return stored
        return None

    def save(self, state: TrainState) -> None:
        self._writer.save(state, Writer.new_attempt())
