"""Hooks for errors of `fit`, `evaluate` and `predict`, and for the end of `fit`. Keras 3.10 to
3.15."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime import private_names
from keras_distplug.backend.tensorflow.runtime.attached import is_marked, mark
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(keras="3.10 to 3.15")

Explain = Callable[[Exception, tf.distribute.Strategy], Exception | None]

# Errors that TensorFlow 2.18 to 2.21 raises in a collective, or from the coordination service, when
# a worker is lost or does not answer; usually the first one.
_OF_A_CONNECTION = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
)
_BROKEN = re.compile(
    "Connection reset|Socket closed|Broken pipe|Connection timed out|Connection refused|"
    "failed to connect|No route to host|recvmsg"
)
_BETWEEN_WORKERS = re.compile("Collective ops is aborted|GRPC error information|RecvBuf|RecvTensor")
_TARGET = re.compile(r"remote target /job:(chief|worker)/replica:0/task:(\d+)")
_SERVER = re.compile(r"/job:ps/replica:0/task:(\d+)")


def explain_with(explain: Explain) -> None:
    """Lets `explain` replace the errors of all models; if it returns None, the error is kept."""
    for name in ("fit", "evaluate", "predict"):
        _UPSTREAM.wrap(private_names.Trainer, name, lambda stock: _explained(stock, explain))


def _explained(stock: Callable[..., Any], explain: Explain) -> Callable[..., Any]:
    if is_marked(stock, "explained"):
        return stock

    @functools.wraps(stock)
    def explained(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(self, *args, **kwargs)
        except Exception as error:
            told = explain(error, self.distribute_strategy)
            if told is None:
                raise
            raise told from error

    mark(explained, "explained")
    return explained


def when_fit_ends(act: Callable[[keras.Model], None]) -> None:
    """Calls `act` with every model whose `fit` has returned or raised."""

    def followed_by_act(stock: Callable[..., Any]) -> Callable[..., Any]:
        if is_marked(stock, "followed"):
            return stock

        @functools.wraps(stock)
        def followed(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
            try:
                return stock(self, *args, **kwargs)
            finally:
                act(self)

        mark(followed, "followed")
        return followed

    _UPSTREAM.wrap(private_names.Trainer, "fit", followed_by_act)


def is_of_a_frozen_service(error: BaseException) -> bool:
    """True if TensorFlow's error says that the coordination service has not answered within the
    heartbeat timeout."""
    return "CoordinationService/Heartbeat" in str(error) and "Deadline Exceeded" in str(error)


def server_in(error: BaseException) -> int | None:
    """Returns the index of the parameter server that TensorFlow's error reports as lost."""
    if not isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
        return None
    found = _SERVER.search(str(error))
    return None if found is None else int(found[1])


def broken_connection_to(error: BaseException) -> str | None:
    """Returns the task at the other end of the connection that broke according to TensorFlow's
    error: "worker-1", or "" if the error does not name it. None for other errors."""
    said = str(error)
    if not (isinstance(error, tf.errors.OpError) and _BROKEN.search(said)):
        return None
    if not _BETWEEN_WORKERS.search(said):
        return None  # a connection of a file system, for example
    found = _TARGET.search(said)
    return "" if found is None else f"{found[1]}-{found[2]}"


def may_be_of_a_connection(error: BaseException) -> bool:
    """True if TensorFlow's error could be caused by a lost worker."""
    return isinstance(error, _OF_A_CONNECTION)
