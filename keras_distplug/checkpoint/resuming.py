"""How a run goes on from its newest checkpoint, and what a person is told then."""

from __future__ import annotations

import time
from collections.abc import Callable

from keras_distplug.checkpoint.candidates import Candidates, Found
from keras_distplug.checkpoint.fit_state import FitState
from keras_distplug.core.errors import CheckpointError
from keras_distplug.core.events import Restored
from keras_distplug.core.reporting import report
from keras_distplug.runlog.last_attempt import look_back
from keras_distplug.storage.files import Files


def take_up_newest(
    state: FitState,
    candidates: Candidates,
    make_ready_for: Callable[[Found], None],
    go_on_from: Callable[[Found], None],
) -> bool:
    """Takes up the newest checkpoint whose bytes are what was committed, if there is one.

    A checkpoint is read once: what is not yet verified goes into the model. What was there is kept,
    by reference, and put back if the checkpoint turns out to be damaged.

    Args:
        state: That of the `fit`.
        candidates: The checkpoints.
        make_ready_for: Makes the model ready for the values of one, or raises.
        go_on_from: Makes `fit` go on from one whose values are in the model.
    """
    begun_s = time.monotonic()
    while (found := candidates.newest()) is not None:
        make_ready_for(found)
        damage = state.read(found)
        if damage is None:
            go_on_from(found)
            cursor, secs = state.cursor, time.monotonic() - begun_s
            report(
                Restored(cursor.step, cursor.epoch, cursor.batch, found.where, found.is_local, secs)
            )
            return True
        candidates.reject(found, damage)
    return False


def line(found: Found, files: Files, run: str, *, chief: str, epochs: int) -> str:
    """From where a run goes on, or that it is finished.

    Args:
        found: The checkpoint.
        files: The directory.
        run: The name of the run's folder in it.
        chief: The name of the worker that says it.
        epochs: So many are asked for.
    """
    cursor, name = found.stored.manifest.cursor, found.stored.name
    which = f"local checkpoint {found.where}" if found.is_local else f"checkpoint {name}"
    where = f"{files.where(run)}, {which}"
    if found.ends:
        return (
            f"{where}: this run is finished ({cursor.epoch} epochs). Its History and weights are "
            "returned; give more epochs to go on, or resume=False to begin a new run"
        )
    batch = f"batch {cursor.batch + 1}, " if cursor.batch else ""
    return (
        f"{where}: resuming at epoch {cursor.epoch + 1}/{epochs}, {batch}step {cursor.step}"
        f"{_attempts(files, run, chief, cursor.step)}"
    )


def new_run_line(files: Files, run: str, chief: str) -> str:
    """Returns what is said of a run without a checkpoint, which may have had attempts.

    Args:
        files: The directory.
        run: The name of the run's folder in it.
        chief: The name of the worker that says it.
    """
    where = files.where(run)
    try:
        before = look_back(files, run, chief)
    except (CheckpointError, OSError):
        before = None  # training needs no log
    if before is None:
        return f"new run {where}"
    trained = ""
    if before.last_step:
        steps = "1 step" if before.last_step == 1 else f"{before.last_step} steps"
        trained = f" after {'' if before.has_told_all else 'at least '}{steps}"
    return (
        f"{where}: attempt {before.attempts} left no checkpoint{trained}; starting from the "
        "beginning"
    )


def _attempts(files: Files, run: str, chief: str, step: int) -> str:
    """How many there are, and what the last one loses; nothing where no log was kept."""
    try:
        before = look_back(files, run, chief)
    except (CheckpointError, OSError) as error:
        # Training needs no log.
        return f" (how many attempts there were is not known: {error})"
    if before is None:
        return ""
    loss = before.loss(step)
    return f" (attempt {before.attempts + 1}{'; ' if loss else ''}{loss})"
