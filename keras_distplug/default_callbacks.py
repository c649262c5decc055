"""Which callbacks a run gets, in which order."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.runtime import versions
from keras_distplug.callbacks.watchdog import deferring
from keras_distplug.checkpoint.backup_and_restore import BackupAndRestore
from keras_distplug.checkpoint.cadence import SaveFreq
from keras_distplug.cluster import peers
from keras_distplug.hang.hang_watchdog import HangWatchdog
from keras_distplug.nonfinite.nan_watchdog import NaNWatchdog
from keras_distplug.preemption.preemption_handler import PreemptionHandler
from keras_distplug.replicas.straggler_watchdog import StragglerWatchdog
from keras_distplug.runlog.run_log import RunLog


def defaults(
    directory: str | os.PathLike[str] | None = None,
    *,
    save_freq: SaveFreq = "epoch",
    storage_options: Mapping[str, Any] | None = None,
    resume: bool = True,
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
            `keras_distplug_runs/<name of the script>` in the working folder, and
            `<name of the script>-2` at the second call in a process. Every training needs a folder
            of its own.
        save_freq: `"epoch"`, an integer number of batches, a time such as `"5min"`, `"auto"` for as
            often as costs a hundredth of the time, or `False` to save at the end only. Defaults to
            `"epoch"`. `BackupAndRestore` has more to choose.
        storage_options: As in `BackupAndRestore`.
        resume: `False` begins a new run beside what the folder holds. Defaults to `True`.

    Returns:
        A new, plain list.
    """
    versions.check()
    # Keras fails under MultiWorkerMirroredStrategy before it looks at the callbacks.
    trainer.install_dispatch()
    peers.watch()
    return [
        deferring(
            BackupAndRestore(
                default_directory() if directory is None else directory,
                save_freq=save_freq,
                storage_options=storage_options,
                delete_checkpoint=False,
                resume=resume,
            )
        ),
        deferring(PreemptionHandler()),
        deferring(HangWatchdog()),
        deferring(NaNWatchdog()),
        deferring(StragglerWatchdog()),
        deferring(RunLog()),
    ]


def default_directory() -> Path:
    """`keras_distplug_runs/<script>` in the working folder, `<script>-2` for the next one.

    The number keeps several trainings of one script apart; started again, it comes to the same
    ones in the same order.
    """
    script = Path(sys.argv[0] if sys.argv else "")
    name = script.resolve().parent.name if script.name == "__main__.py" else script.stem
    if name in ("", "-c", "ipykernel_launcher"):
        name = "interactive"
    number = next(_trainings)
    return Path("keras_distplug_runs") / (name if number == 1 else f"{name}-{number}")


_trainings = itertools.count(1)
