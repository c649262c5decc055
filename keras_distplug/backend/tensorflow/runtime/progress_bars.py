"""Only the chief draws progress bars (Keras 3.10 to 3.15).

Under MultiWorkerMirroredStrategy, Keras draws the same bar on every worker.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime.attached import is_marked, mark
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.backend.tensorflow.runtime.workers import is_multi_worker, resolver_of

_UPSTREAM = Upstream(keras="3.10 to 3.15")


def install() -> None:
    """Silences progress bars on workers other than the chief, in `fit`, `evaluate` and `predict`.

    `verbose="auto"` and 1 print nothing there. `verbose=2`, a line per epoch, prints on every
    worker: it has to be asked for. Models under other strategies are unaffected.
    """
    stock = keras.callbacks.ProgbarLogger.set_params
    if is_marked(stock):
        return

    @functools.wraps(stock)
    def set_params(self: keras.callbacks.ProgbarLogger, params: Mapping[str, Any]) -> None:
        stock(self, params)
        if self.verbose == 1 and _is_beside_chief(self.model):
            self.verbose = 0

    mark(set_params)
    _UPSTREAM.patch(keras.callbacks.ProgbarLogger, "set_params", set_params)


def remove() -> None:
    """Undoes `install`."""
    if is_marked(ours := keras.callbacks.ProgbarLogger.set_params):
        _UPSTREAM.patch(keras.callbacks.ProgbarLogger, "set_params", ours.__wrapped__)


def _is_beside_chief(model: keras.Model | None) -> bool:
    """True if this process trains the model together with the chief, and is not the chief."""
    strategy: tf.distribute.Strategy | None = getattr(model, "distribute_strategy", None)
    if strategy is None or not is_multi_worker(strategy):
        return False
    resolver = resolver_of(strategy)
    has_chief = "chief" in resolver.cluster_spec().jobs
    is_chief = resolver.task_type == "chief" or (not has_chief and resolver.task_id == 0)
    return not is_chief
