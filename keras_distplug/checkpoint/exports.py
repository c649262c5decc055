"""Exports checkpoints as files from within a script that has the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_distplug.backend.tensorflow.parameter_server import scheduled
from keras_distplug.checkpoint import model_export, saver
from keras_distplug.cluster import agreement, roles
from keras_distplug.core.errors import NoCheckpointError
from keras_distplug.core.log import announce
from keras_distplug.storage import architecture, export_file, runs
from keras_distplug.storage.architecture import Architecture
from keras_distplug.storage.export_file import Export
from keras_distplug.storage.files import Files
from keras_distplug.storage.store import Stored

get_architecture = model_export.get_architecture


def remember(files: Files, run: str, model: Mapping[str, Any] | None, step: int) -> None:
    """Records the run's model architecture, if it is known."""
    if model is not None:
        architecture.remember(files, run, Architecture(model, step))


def export(
    files: Files,
    run: str | None,
    asked: Export,
    model: keras.Model | None,
) -> None:
    """Writes a checkpoint as one file, on the chief.

    Args:
        files: The directory of the runs.
        run: The run in progress, if any.
        asked: The requested export.
        model: The model in training, if it exists already.

    Raises:
        NoCheckpointError: If the checkpoint does not exist.
        DistplugError: As from `storage.export.export`.
    """
    if model is None:
        role = roles.from_environment(os.environ)
    else:
        role = agreement.get_role(model.distribute_strategy)
    if not role.is_chief:
        return
    saver.wait_for_all()
    if runs.newest_name(files) is None:
        raise NoCheckpointError(
            f"{files.where()} holds no run to export. Call `export` after a checkpoint is saved. "
            "With delete_checkpoint=True, the default of BackupAndRestore, checkpoints are deleted "
            "once training has finished; use delete_checkpoint=False to keep them."
        )

    def save(run: str, stored: Stored, path: Path) -> None:
        # Saving a model shared by several workers is a collective operation, as is reading metrics.
        if model is not None and role.world_size == 1:
            scheduled.settle(model)
            model_export.save_through(model, stored.manifest, stored.values, path)
        else:
            made = architecture.recall(files, run, stored.manifest.cursor.step)
            stored.require_files()
            model_export.save_rebuilt(made.model, stored.manifest, stored.values, path)

    done = export_file.export(files, run, asked, save)
    announce(f"{files.where(done.run)}, checkpoint {done.checkpoint}: exported to {done.out}")
