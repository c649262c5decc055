"""Which callbacks a run gets, in which order."""

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
    """Callbacks that make `model.fit` survive: pass them, start the script again, and it goes on.

    `BackupAndRestore` makes checkpoints, `PreemptionHandler` one more when the process is told to
    go, `HangWatchdog` ends a training that does not get on, `NaNWatchdog` keeps updates that
    are not finite out of it, `StragglerWatchdog` names the replica that others wait for, and
    `RunLog` keeps a log of all that, and of where the time goes. Give one of your own beside these,
    and it takes the place of that here.

    Example:

    ```python
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), MyCallback()])
    ```

    Their place among other callbacks does not matter. Nothing that a run wrote is ever deleted but
    checkpoints that newer ones replace. The same script started again with the same `epochs`
    returns at once with the stored `History` and weights; with more `epochs` it goes on.

    Args:
        directory: Folder of this training, or a URL such as `s3://bucket/runs/mnist`. Defaults to
            `keras_distplug_runs/<name of the script>` in the working folder, with
            `-task-<number>` appended for a task of an array job. In it, every model and every data
            set has its own run; concurrent jobs need separate folders.
        save_freq: `"epoch"`, an integer number of batches, a time such as `"5min"`, `"auto"`, or
            `False` to save at the end only. Defaults to `"auto"`: the first checkpoint within a
            minute, then as often as costs 1 % of the time.
        storage_options: As in `BackupAndRestore`.
        resume: `False` begins a new run beside what the folder holds. Defaults to `True`.
        single: Fields of `Saving`, `Retention`, `Resuming` and `LocalCheckpoints`, such as
            `keep_best=("val_loss", "min", 1)`, `allow_data_change=True` or
            `init_from="runs/other"`.

    Returns:
        A new, plain list.
    """
    versions.check()
    keras_backend.warn_of_distribution()
    announce_missing()
    # Keras fails under MultiWorkerMirroredStrategy before it looks at the callbacks.
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
    """What Keras calls first on each of the `callbacks`."""
    raise ConfigurationError(
        "Expected callbacks. Received: the function `defaults` itself. Write "
        "`callbacks=keras_distplug.defaults()`, with parentheses."
    )


defaults.__dict__["set_model"] = _refuse_uncalled


def default_directory() -> Path:
    """`keras_distplug_runs/<script>` in the working folder, with the number of the task for a task
    of an array job.

    Several trainings of a script have several runs in it.
    """
    script = Path(sys.argv[0] if sys.argv else "")
    name = script.resolve().parent.name if script.name == "__main__.py" else script.stem
    if name in ("", "-c", "ipykernel_launcher"):
        name = "interactive"
    task = array_task(os.environ)
    return Path("keras_distplug_runs") / (name if task is None else f"{name}-task-{task}")
