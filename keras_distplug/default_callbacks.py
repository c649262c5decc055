"""The default callbacks of a run, and their order."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import keras

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.runtime import keras_backend, versions
from keras_distplug.callbacks.watchdog import deferring
from keras_distplug.checkpoint.backup_and_restore import BackupAndRestore
from keras_distplug.checkpoint.cadence import SaveFreq
from keras_distplug.checkpoint.settings import Single
from keras_distplug.cluster import peers
from keras_distplug.cluster.array_tasks import array_task
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.operating_system import announce_missing
from keras_distplug.hang.hang_watchdog import HangWatchdog
from keras_distplug.nonfinite.nan_watchdog import NaNWatchdog
from keras_distplug.preemption.preemption_handler import PreemptionHandler
from keras_distplug.replicas.straggler_watchdog import StragglerWatchdog
from keras_distplug.runlog.run_log import RunLog


def defaults(
    directory: str | os.PathLike[str] | None = None,
    *,
    save_freq: SaveFreq = "auto",
    storage_options: Mapping[str, Any] | None = None,
    resume: bool = True,
    **single: Unpack[Single],
) -> list[keras.callbacks.Callback]:
    """Returns callbacks that make `model.fit` resumable: start the script again, and it continues.

    `BackupAndRestore` saves checkpoints, and `PreemptionHandler` saves one when the process is
    preempted. `HangWatchdog` ends training that makes no progress, `NaNWatchdog` skips updates that
    are not finite, and `StragglerWatchdog` names the replica that the others wait for. `RunLog`
    logs all of this, and where the time goes. An instance of one of these classes in your list of
    callbacks replaces the default one.

    Example:

    ```python
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), MyCallback()])
    ```

    Their position among other callbacks does not matter. Nothing that a run wrote is ever deleted,
    except checkpoints that newer ones replace. A finished script that is started again with the
    same `epochs` returns immediately with its `History` and weights; with more `epochs`, training
    continues.

    Args:
        directory: The folder of the training, or a URL such as `s3://bucket/runs/mnist`. Defaults
            to `keras_distplug_runs/<name of the script>` in the working folder, with
            `-task-<number>` appended for a task of an array job. In that default
            folder, every model and every data set has its own run; concurrent jobs need separate
            folders.
        save_freq: `"epoch"`, an integer number of batches, a time such as `"5min"`, `"auto"`, or
            `False` to save only at the end. Defaults to `"auto"`: the first checkpoint after 10
            steps, or within the first minute if steps are slow, then as often as
            possible without taking more than 1% of the time.
        storage_options: See `BackupAndRestore`. Defaults to `None`.
        resume: `False` starts a new run next to the existing ones. Defaults to `True`.
        single: Fields of `Saving`, `Retention`, `Resuming` and `LocalCheckpoints`, such as
            `keep_best=("val_loss", "min", 1)`, `allow_data_change=True` or
            `init_from="runs/other"`.

    Returns:
        A new list of callbacks.

    Raises:
        ConfigurationError: If an argument is invalid, or another backend of Keras is in use.
        VersionError: If this package does not support the installed versions.
    """
    versions.check()
    keras_backend.warn_of_distribution()
    announce_missing()
    # Under MultiWorkerMirroredStrategy, Keras fails before it calls any callback.
    trainer.install_dispatch()
    peers.watch()
    backup = BackupAndRestore(
        default_directory() if directory is None else directory,
        save_freq=save_freq,
        storage_options=storage_options,
        delete_checkpoint=False,
        resume=resume,
        **single,
    )
    backup.is_shared_directory = directory is None
    return [
        deferring(backup),
        deferring(PreemptionHandler()),
        deferring(HangWatchdog()),
        deferring(NaNWatchdog()),
        deferring(StragglerWatchdog()),
        deferring(RunLog()),
    ]


def _refuse_uncalled(model: object) -> None:
    """Takes the first call that Keras makes to every callback."""
    raise ConfigurationError(
        "Expected callbacks. Received: the function `defaults` itself. Write "
        "`callbacks=keras_distplug.defaults()`, with parentheses."
    )


defaults.__dict__["set_model"] = _refuse_uncalled


def default_directory() -> Path:
    """Returns `keras_distplug_runs/<script>`, with the number of the task in an array job.

    Several training jobs of a script have separate runs in it.
    """
    script = Path(sys.argv[0] if sys.argv else "")
    name = script.resolve().parent.name if script.name == "__main__.py" else script.stem
    if name in ("", "-c", "ipykernel_launcher"):
        name = "interactive"
    task = array_task(os.environ)
    return Path("keras_distplug_runs") / (name if task is None else f"{name}-task-{task}")
