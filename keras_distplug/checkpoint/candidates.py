"""Chooses the checkpoint from which training resumes."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import Any

from keras_distplug.checkpoint.local_tier import Copy, LocalTier
from keras_distplug.cluster.channel import Channel
from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError
from keras_distplug.core.events import Quarantined
from keras_distplug.core.reporting import report
from keras_distplug.core.state import Completion
from keras_distplug.storage.store import CheckpointStore, Stored


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to resume from.

    Args:
        stored: The checkpoint.
        where: Its location, for messages.
        ends: True if the run ends there.
        is_local: True if it is this worker's own copy.
    """

    stored: Stored
    where: str
    ends: bool
    is_local: bool


class Candidates:
    """The checkpoints of a run, of which all workers choose the same one.

    All workers must call the same methods.

    Args:
        store: The checkpoints shared by all workers.
        local: The checkpoints on this worker's machine.
        agreement: The channel between the workers.
        is_chief: True on the worker that looks for the shared ones.
        epochs: The number of epochs that `fit` was called with.
    """

    def __init__(
        self,
        store: CheckpointStore,
        local: LocalTier | None,
        agreement: Channel,
        *,
        is_chief: bool,
        epochs: int,
    ) -> None:
        self._store = store
        self._local = local
        self._agreement = agreement
        self._is_chief = is_chief
        self._epochs = epochs
        self._rejected: set[str] = set()

    def newest(self) -> Candidate | None:
        """Returns the newest one that was not rejected; None if the run has none.

        Raises:
            CorruptCheckpointError: If all existing ones are damaged.
            CheckpointError: If one cannot be read.
        """
        shared, message = None, None
        if self._is_chief:
            shared, message = self._newest_shared()
        reply = json.loads(self._agreement.broadcast("checkpoint", message))
        if self._local is not None and not reply["ends"]:
            copy = self._newest_on_all(self._local, newer_than=reply["step"])
            if copy is not None:
                ends = reply["may_end"] and _has_stopped(copy.stored)
                return Candidate(copy.stored, copy.where, ends, is_local=True)
        if reply["damage"] is not None:
            raise CorruptCheckpointError(reply["damage"])
        if reply["name"] is None:
            return None
        stored = shared or self._store.read(reply["name"])
        return Candidate(stored, self._store.where(stored.name), reply["ends"], is_local=False)

    def reject(self, found: Candidate, damage: CheckpointError) -> None:
        """Excludes a checkpoint from `newest`.

        Raises:
            CheckpointError: `damage`, if it may be temporary: a shared checkpoint is not discarded.
        """
        if found.is_local:
            self._rejected.add(found.stored.manifest.nonce)
            report(Quarantined(found.where, str(damage)))
            warnings.warn(f"Skipped the local checkpoint {found.where}: {damage}", stacklevel=2)
        elif not isinstance(damage, CorruptCheckpointError):
            raise damage
        elif self._is_chief:
            self._store.quarantine(found.stored.name, damage)

    def _newest_shared(self) -> tuple[Stored | None, str]:
        """Returns the newest shared checkpoint, and its description for the other workers."""
        reply: dict[str, Any] = {
            "name": None,
            "step": -1,
            "ends": False,
            "may_end": True,
            "damage": None,
        }
        try:
            step = self._store.newest("step")
            final = self._store.newest("final")
        except CorruptCheckpointError as error:
            return None, json.dumps({**reply, "damage": str(error)})
        stored, ends = self._newer(step, final)
        if stored is not None:
            reply |= {"name": stored.name, "step": stored.manifest.cursor.step}
        return stored, json.dumps({**reply, "ends": ends, "may_end": final is None})

    def _newer(self, step: Stored | None, final: Stored | None) -> tuple[Stored | None, bool]:
        if final is None:
            # Training had stopped, but was killed before that could be recorded.
            return step, step is not None and _has_stopped(step)
        if _completion(final).epochs >= self._epochs:
            return final, True
        # At the same step, resume mid-run: callbacks may have changed the model at the end.
        if step is not None and step.manifest.cursor.step >= final.manifest.cursor.step:
            return step, False
        return final, False

    def _newest_on_all(self, local: LocalTier, newer_than: int) -> Copy | None:
        """Returns the newest local checkpoint of which every worker has a copy."""
        copies = local.copies()
        mine = {
            attempt: (copy.stored.manifest.cursor.step, copy.stored.manifest.created_utc)
            for attempt, copy in copies.items()
            if attempt not in self._rejected
        }
        all_have = [json.loads(text) for text in self._agreement.gather("local", json.dumps(mine))]
        common = set(all_have[0]).intersection(*all_have[1:])
        rated = [(*all_have[0][attempt], attempt) for attempt in common]
        newest = max((each for each in rated if each[0] > newer_than), default=None)
        return None if newest is None else copies[newest[-1]]


def _has_stopped(stored: Stored) -> bool:
    """Returns True if training was stopped there. Mid-epoch, that epoch must still be finished."""
    return stored.manifest.stop_training and not stored.manifest.cursor.batch


def _completion(stored: Stored) -> Completion:
    completion: Completion | None = stored.manifest.completion
    if completion is None:
        raise CorruptCheckpointError(
            f"Expected the final checkpoint {stored.name} to record how the run ended. Received: a "
            "checkpoint without that record. Pass resume=False to start a new run."
        )
    return completion
