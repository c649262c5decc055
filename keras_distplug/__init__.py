"""Fault-tolerant distributed `model.fit` for Keras 3 on TensorFlow.

```python
import keras_distplug as kd

model.fit(ds, epochs=10, callbacks=kd.defaults("runs/mnist"))
kd.distributed_fit(model, ds, epochs=10, directory="runs/digits")
```

TensorFlow and Keras are loaded when a name that needs them is used for the first time.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_distplug.backend.tensorflow.trainer import adapt
    from keras_distplug.callbacks.chief_only import chief_only
    from keras_distplug.checkpoint.backup_and_restore import BackupAndRestore
    from keras_distplug.checkpoint.settings import LocalCheckpoints, Resuming, Saving
    from keras_distplug.core import errors
    from keras_distplug.data.feed import resumable
    from keras_distplug.default_callbacks import defaults
    from keras_distplug.fit import distributed_fit
    from keras_distplug.hang.hang_watchdog import HangWatchdog
    from keras_distplug.nonfinite.nan_watchdog import NaNWatchdog
    from keras_distplug.preemption.preemption_handler import PreemptionHandler
    from keras_distplug.replicas.replica_metrics import ReplicaMetrics
    from keras_distplug.replicas.straggler_watchdog import StragglerWatchdog
    from keras_distplug.runlog.run_log import RunLog
    from keras_distplug.startup import global_batch, init, scaled_learning_rate
    from keras_distplug.step.instrumentation import StepInstrument, instrument_step
    from keras_distplug.storage.files import register_store
    from keras_distplug.storage.retention import Retention
    from keras_distplug.trackers.mlflow_tracker import MlflowTracker
    from keras_distplug.trackers.wandb_tracker import WandbTracker

__all__ = [
    "BackupAndRestore",
    "HangWatchdog",
    "LocalCheckpoints",
    "MlflowTracker",
    "NaNWatchdog",
    "PreemptionHandler",
    "ReplicaMetrics",
    "Resuming",
    "Retention",
    "RunLog",
    "Saving",
    "StepInstrument",
    "StragglerWatchdog",
    "WandbTracker",
    "__version__",
    "adapt",
    "chief_only",
    "defaults",
    "distributed_fit",
    "errors",
    "global_batch",
    "init",
    "instrument_step",
    "register_store",
    "resumable",
    "scaled_learning_rate",
]

__version__ = "0.1.0"

_HOMES = {
    "BackupAndRestore": "keras_distplug.checkpoint.backup_and_restore",
    "HangWatchdog": "keras_distplug.hang.hang_watchdog",
    "LocalCheckpoints": "keras_distplug.checkpoint.settings",
    "MlflowTracker": "keras_distplug.trackers.mlflow_tracker",
    "NaNWatchdog": "keras_distplug.nonfinite.nan_watchdog",
    "PreemptionHandler": "keras_distplug.preemption.preemption_handler",
    "ReplicaMetrics": "keras_distplug.replicas.replica_metrics",
    "Resuming": "keras_distplug.checkpoint.settings",
    "Retention": "keras_distplug.storage.retention",
    "RunLog": "keras_distplug.runlog.run_log",
    "Saving": "keras_distplug.checkpoint.settings",
    "StepInstrument": "keras_distplug.step.instrumentation",
    "StragglerWatchdog": "keras_distplug.replicas.straggler_watchdog",
    "WandbTracker": "keras_distplug.trackers.wandb_tracker",
    "adapt": "keras_distplug.backend.tensorflow.trainer",
    "chief_only": "keras_distplug.callbacks.chief_only",
    "defaults": "keras_distplug.default_callbacks",
    "distributed_fit": "keras_distplug.fit",
    "errors": "keras_distplug.core.errors",
    "global_batch": "keras_distplug.startup",
    "init": "keras_distplug.startup",
    "instrument_step": "keras_distplug.step.instrumentation",
    "register_store": "keras_distplug.storage.files",
    "resumable": "keras_distplug.data.feed",
    "scaled_learning_rate": "keras_distplug.startup",
}

_BACKEND = "keras_distplug.backend.tensorflow.runtime.keras_backend"
_WITHOUT_KERAS = ("MlflowTracker", "Retention", "WandbTracker", "errors", "register_store")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WITHOUT_KERAS:
        importlib.import_module(_BACKEND).require_tensorflow()
    try:
        home = importlib.import_module(_HOMES[name])
    except ImportError as error:
        versions = "keras_distplug.backend.tensorflow.runtime.versions"
        if explained := importlib.import_module(versions).explain(error):
            raise explained from error
        raise
    return home if name == "errors" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _start_process() -> None:
    """Prepares this process on import; a forked process, when its script imports the package."""
    importlib.import_module("keras_distplug.backend.tensorflow.input.earlier_passes").watch()
    if os.environ.get("KERAS_DISTPLUG_FORK_SERVER"):
        importlib.import_module("keras_distplug.cluster.leaving").register()
        for name in ("keras_distplug.cluster.pulse", *_HOMES.values()):
            importlib.import_module(name)
        return
    if os.environ.get("KERAS_DISTPLUG_JOB"):
        importlib.import_module("keras_distplug.cluster.pulse").begin()
    # Before the first error, and only if a supervisor or scheduler reads the exit code.
    started_by = (
        *("KERAS_DISTPLUG_JOB", "TF_CONFIG", "SLURM_STEP_ID", "CLUSTER_SPEC", "SM_HOSTS"),
        "KERAS_DISTPLUG_ADDRESS",
    )
    if any(os.environ.get(name) for name in started_by):
        importlib.import_module("keras_distplug.cluster.failing").prepare()
    # TensorFlow forms a cluster only before the first tensor exists. A script that a supervisor
    # started as one of several workers has made none when it imports this package.
    if os.environ.get("TF_CONFIG") and os.environ.get("KERAS_DISTPLUG_JOB"):
        importlib.import_module(_BACKEND).require_tensorflow()
        importlib.import_module("keras_distplug.startup").join_on_import()


_start_process()
