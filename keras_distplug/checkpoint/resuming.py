"""Resumes a run from its newest checkpoint, and reports the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_distplug.backend.tensorflow.input import epochs
from keras_distplug.checkpoint import warm_start
from keras_distplug.checkpoint.candidates import Candidate, Candidates
from keras_distplug.checkpoint.fit_state import FitState
from keras_distplug.checkpoint.settings import Resuming
from keras_distplug.cluster.channel import Channel
from keras_distplug.core.collector import collector_paused
from keras_distplug.core.errors import CheckpointError, ConfigurationError
from keras_distplug.core.events import Restored
from keras_distplug.core.log import announce
from keras_distplug.core.reporting import report
from keras_distplug.runlog.last_attempt import find_earlier_attempts
from keras_distplug.storage.files import Files
from keras_distplug.storage.runs import Run


@collector_paused()
def restore_newest(
    state: FitState,
    candidates: Candidates,
    prepare: Callable[[Candidate], None],
    continue_from: Callable[[Candidate], None],
) -> bool:
    """Restores the newest checkpoint whose bytes match the committed checksums, if one exists.

    A checkpoint is read only once, so values go into the model before they are verified. The
    previous values are kept by reference, and written back if the checkpoint is damaged.

    Args:
        state: The state of the `fit`.
        candidates: The checkpoints.
        prepare: Prepares the model for a checkpoint's values, or raises.
        continue_from: Lets `fit` continue from a checkpoint whose values are in the model.

    Returns:
        True if a checkpoint was restored.
    """
    started_s = time.monotonic()
    while (found := candidates.newest()) is not None:
        prepare(found)
        damage = state.read(found)
        if damage is None:
            continue_from(found)
            cursor, secs = state.cursor, time.monotonic() - started_s
            report(
                Restored(cursor.step, cursor.epoch, cursor.batch, found.where, found.is_local, secs)
            )
            return True
        candidates.reject(found, damage)
    return False


def roll_back(state: FitState, candidates: Candidates) -> int | None:
    """Restores the newest checkpoint during training. Returns its step; None if none exists."""
    while (found := candidates.newest()) is not None:
        damage = state.roll_back(found)
        if damage is None:
            return found.stored.manifest.cursor.step
        candidates.reject(found, damage)
    return None


def resume_message(found: Candidate, files: Files, run: str, *, chief: str, epochs: int) -> str:
    """Returns a message with the step from which a run resumes, or that it is finished.

    Args:
        found: The checkpoint.
        files: The directory.
        run: The name of the run's folder in it.
        chief: The name of the chief.
        epochs: The number of epochs that `fit` was called with.
    """
    cursor, name = found.stored.manifest.cursor, found.stored.name
    which = f"local checkpoint {found.where}" if found.is_local else f"checkpoint {name}"
    where = f"{files.where(run)}, {which}"
    if found.ends:
        return (
            f"{where}: this run is finished ({cursor.epoch} epochs). Its History and weights are "
            "returned; pass more epochs to continue, or resume=False to start a new run"
        )
    if cursor.epoch >= epochs:
        place = f"in epoch {cursor.epoch + 1}" if cursor.batch else f"after epoch {cursor.epoch}"
        return f"{where}: nothing left to train: the checkpoint is {place}, and epochs={epochs}"
    batch = f"batch {cursor.batch + 1}, " if cursor.batch else ""
    return (
        f"{where}: resuming at epoch {cursor.epoch + 1}/{epochs}, {batch}step {cursor.step}"
        f"{_describe_attempts(files, run, chief, cursor.step)}"
    )


def require_own_list(*, made_in_fit: bool, is_chief: bool) -> None:
    """Checks that `fit` made the list of callbacks; reports the limits of a custom loop.

    Args:
        made_in_fit: True if the callbacks were given their model in `fit`.
        is_chief: True if this worker reports.

    Raises:
        ConfigurationError: If `fit` was given a `CallbackList`.
    """
    is_fit = epochs.get_loop() is not None
    if is_fit and not made_in_fit:
        raise ConfigurationError(
            "Expected `callbacks` to be a list. Received: a `CallbackList` that was created "
            "before `fit`, so it lacks the numbers of epochs and steps. Write "
            "`callbacks=[...]`, with the same callbacks."
        )
    if not is_fit and is_chief:
        announce(
            "the callbacks are called by a custom training loop, not by Keras' `fit`: a restart "
            "restores the model, its optimizer and the callbacks, but the loop itself must skip "
            "the batches trained before the checkpoint. Use `model.fit` to resume exactly"
        )


def start_new_run(
    model: keras.Model,
    files: Files,
    run: Run,
    agreement: Channel,
    resuming: Resuming,
    storage_options: Mapping[str, Any],
) -> None:
    """Announces a new run, and loads the values of the run in `init_from`, if given.

    Args:
        model: The model about to be trained.
        files: The directory.
        run: The new run.
        agreement: The channel between the workers.
        resuming: The user's settings.
        storage_options: As in `BackupAndRestore`; also used for a store of the same kind in
            `init_from`.
    """
    role = agreement.role
    lines = [new_run_message(files, run.name, role.name)] if role.is_chief else []
    if (other := resuming.init_from) is not None:
        options = storage_options if _scheme(str(other)) == _scheme(files.where()) else None
        with_optimizer = resuming.init_optimizer
        lines += warm_start.load(model, other, options, agreement, with_optimizer=with_optimizer)
    for resume_message in lines if role.is_chief else ():
        announce(resume_message)


def _scheme(where: str) -> str:
    return where.partition("://")[0] if "://" in where else ""


def new_run_message(files: Files, run: str, chief: str) -> str:
    """Returns the message for a run without a checkpoint, which may have had attempts.

    Args:
        files: The directory.
        run: The name of the run's folder in it.
        chief: The name of the chief.
    """
    where = files.where(run)
    try:
        before = find_earlier_attempts(files, run, chief)
    except (CheckpointError, OSError):
        before = None  # training does not need the log
    if before is None:
        return f"new run {where}"
    trained = ""
    if before.last_step:
        steps = "1 step" if before.last_step == 1 else f"{before.last_step} steps"
        trained = f" after {'' if before.has_told_all else 'at least '}{steps}"
    return f"{where}: attempt {before.attempts} left no checkpoint{trained}; starting from scratch"


def _describe_attempts(files: Files, run: str, chief: str, step: int) -> str:
    """Returns the number of attempts and the lost steps as text; empty without a log."""
    try:
        before = find_earlier_attempts(files, run, chief)
    except (CheckpointError, OSError) as error:
        # Training does not need the log.
        return f" (number of attempts unknown: {error})"
    if before is None:
        return ""
    loss = before.loss(step)
    return f" (attempt {before.attempts + 1}{'; ' if loss else ''}{loss})"
