"""Checkpoints on the workers' own machines: made often, and valid as long as the machines live.

    <local_tier>/
      <run id>/
        <session>/                            one `fit`
          rank-0/step-00000042/...            as in `layout.py`, the whole state in one share

Every worker writes the whole state, so that it can read it back without the others. A checkpoint
is usable if every worker finds a copy of it, no matter which worker wrote that copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from keras_distplug.core.errors import CheckpointError
from keras_distplug.core.protocols import Exchange
from keras_distplug.core.state import TrainState
from keras_distplug.storage import layout
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.files import Files
from keras_distplug.storage.meter import Meter
from keras_distplug.storage.retention import Retention
from keras_distplug.storage.store import CheckpointStore, Stored

KEPT = 2


@dataclass(frozen=True)
class Copy:
    """A local checkpoint, and its location for messages."""

    stored: Stored
    where: str


class LocalTier:
    """The local checkpoints of one run on this machine.

    Args:
        files: The folder for the local checkpoints of all runs.
        run_id: The run's id.
    """

    def __init__(self, files: Files, run_id: str) -> None:
        self._files = files
        self._run_id = run_id

    def copies(self) -> dict[str, Copy]:
        """Returns all committed ones by their attempt. Warns about those that cannot be read."""
        found: dict[str, Copy] = {}
        try:
            for store in self._stores():
                for name in store.committed("step"):
                    try:
                        stored = store.read(name)
                    except CheckpointError as error:
                        where = store.where(name)
                        _warn(f"The local checkpoint {where} is not used to resume: {error}")
                    else:
                        found[stored.manifest.nonce] = Copy(stored, store.where(name))
        except CheckpointError as error:
            _warn(f"Not all local checkpoints of this machine can be used to resume: {error}")
        return found

    def writer(self, session: str, rank: int, exchange: Exchange) -> LocalWriter:
        """Returns a writer for this worker's copies.

        Args:
            session: A name that is the same on all workers, and different for every `fit`.
            rank: This worker's rank.
            exchange: The exchange of a team that consists of this worker only.
        """
        return LocalWriter(self, self._files, f"{self._run_id}/{session}", rank, exchange)

    def delete_sessions(self, kept_session: str = "") -> None:
        """Deletes this machine's copies of the run, except those in the folder `kept_session`."""
        try:
            for session in layout.names(self._files, self._run_id):
                if (folder := f"{self._run_id}/{session}") != kept_session:
                    self._files.delete(folder)
            if not kept_session:
                self._files.delete(self._run_id)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"Old local checkpoints in {self._files.where(self._run_id)} were not deleted: "
                f"{str(error).rstrip('.')}. They use space, but do no other harm.",
                stacklevel=2,
            )

    def _stores(self) -> Iterator[CheckpointStore]:
        for session in layout.names(self._files, self._run_id):
            for rank in layout.names(self._files, f"{self._run_id}/{session}"):
                yield CheckpointStore(self._files, f"{self._run_id}/{session}/{rank}")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


class LocalWriter:
    """Writes one worker's local checkpoints in one session. Made by `LocalTier.writer`."""

    def __init__(
        self, tier: LocalTier, files: Files, session: str, rank: int, exchange: Exchange
    ) -> None:
        store = CheckpointStore(files, f"{session}/rank-{rank}", Retention(KEPT))
        self._writer = Writer(files, store, Team(0, 1, exchange))
        self._tier = tier
        self._session = session
        self._saved = 0

    @property
    def meter(self) -> Meter:
        return self._writer.meter

    def save(self, state: TrainState, attempt: str) -> None:
        """Does the same as `Writer.save`, then deletes old sessions."""
        self._writer.save(state, attempt)
        self._saved += 1
        if self._saved == KEPT:
            # Earlier sessions may hold newer ones, but then some worker has lost its copy.
            self._tier.delete_sessions(kept_session=self._session)
