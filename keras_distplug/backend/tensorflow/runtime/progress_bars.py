"""Progress bars of Keras 3.10 to 3.15, on several workers and between our messages.

Under MultiWorkerMirroredStrategy, Keras draws the same bar on every worker. A message that is
printed during an epoch would be appended to the open line of the bar.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils import io_utils

from keras_distplug.backend.tensorflow.runtime.attached import is_marked, mark
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.backend.tensorflow.runtime.workers import get_resolver, is_multi_worker
from keras_distplug.core import log

_UPSTREAM = Upstream(keras="3.10 to 3.15")


def install() -> None:
    """Silences progress bars on workers other than the chief, in `fit`, `evaluate` and `predict`.

    Messages of this package start on a new line, below the bar.

    `verbose="auto"` and 1 print nothing there. `verbose=2`, a line per epoch, prints on every
    worker, because the user has asked for it. Models under other strategies are unaffected.
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
    _UPSTREAM.patch(io_utils, "print_msg", _watched(io_utils.print_msg))
    log.end_open_lines(_Line.take)


def remove() -> None:
    """Undoes `install`."""
    if is_marked(ours := keras.callbacks.ProgbarLogger.set_params):
        _UPSTREAM.patch(keras.callbacks.ProgbarLogger, "set_params", ours.__wrapped__)
        _UPSTREAM.patch(io_utils, "print_msg", io_utils.print_msg.__wrapped__)
        _Line.is_open = False


class _Line:
    """The last line that Keras printed."""

    is_open = False

    @classmethod
    def take(cls) -> bool:
        """Returns True if the line is open, once."""
        was_open, cls.is_open = cls.is_open, False
        return was_open


def _watched(stock: Callable[..., None]) -> Callable[..., None]:
    """Returns a `print_msg` that notes whether it leaves its line open, as progress bars do."""

    @functools.wraps(stock)
    def print_msg(message: str, line_break: bool = True) -> None:
        stock(message, line_break)
        is_printed = io_utils.is_interactive_logging_enabled()
        _Line.is_open = is_printed and not line_break and not message.endswith("\n")

    return print_msg


def _is_beside_chief(model: keras.Model | None) -> bool:
    """True if this process trains the model together with the chief, and is not the chief."""
    strategy: tf.distribute.Strategy | None = getattr(model, "distribute_strategy", None)
    if strategy is None or not is_multi_worker(strategy):
        return False
    resolver = get_resolver(strategy)
    has_chief = "chief" in resolver.cluster_spec().jobs
    is_chief = resolver.task_type == "chief" or (not has_chief and resolver.task_id == 0)
    return not is_chief
