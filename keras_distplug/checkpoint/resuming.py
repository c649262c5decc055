"""What a person is told when a run goes on."""

from __future__ import annotations

from keras_distplug.checkpoint.candidates import Found
from keras_distplug.core.errors import CheckpointError
from keras_distplug.runlog.last_attempt import look_back
from keras_distplug.storage.files import Files


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
