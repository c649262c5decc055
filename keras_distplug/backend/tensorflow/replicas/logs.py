"""Logs of a step, combined over replicas or taken from the metrics.

Keras 3.10 to 3.15 and TensorFlow 2.18 to 2.21: see `trainer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.share import current


class Logged:
    """The names under which steps have logged metric results, and those of other values."""

    def __init__(self) -> None:
        self.results: set[str] = set()
        self.others: set[str] = set()

    def note(self, logs: Any, results: Any) -> None:
        for name, value in logs.items() if isinstance(logs, dict) else ():
            if isinstance(value, dict):
                self.note(value, results)
            else:
                (self.results if any(value is r for r in results) else self.others).add(name)

    def is_result(self, name: str) -> bool:
        return name in self.results and name not in self.others


def recorded_result(metric: keras.metrics.Metric) -> Callable[[], Any]:
    stock = metric.result

    def result() -> Any:
        value = stock()
        if (share := current()) is not None:
            share.results += keras.tree.flatten(value)
        return value

    return result


def merged_results(model: keras.Model, logged: Logged) -> Callable[[Any], Any]:
    """Replaces logged metric results by the metrics' results over all replicas.

    Keras only does so if the step has logged all metrics and nothing else.
    """
    stock = model._get_metrics_result_or_logs

    def of_all(logs: Any) -> Any:
        results = model.get_metrics_result()

        def replaced(logs: Any) -> Any:
            if not isinstance(logs, dict):
                return logs
            return {
                name: _like(value, results.get(name, value))
                if logged.is_result(name)
                else replaced(value)
                for name, value in logs.items()
            }

        return replaced(stock(logs))

    return of_all


def _like(value: Any, result: Any) -> Any:
    """Converts `result` to a tensor if `value` is one: Keras 3.10 returns results as Python
    numbers, but steps log tensors."""
    return tf.convert_to_tensor(result, value.dtype) if tf.is_tensor(value) else result


def mean(values: Sequence[Any]) -> Any:
    """Returns the mean of the local replicas' logs; the first one if they have no mean."""
    first = values[0]
    if len(values) == 1 or not tf.is_tensor(first) or not first.dtype.is_floating:
        return first
    return tf.add_n(values) / tf.cast(len(values), first.dtype) if not first.shape.rank else first


def mean_over_workers(outputs: Any) -> Any:
    """Averages the scalars of a step's logs over all replicas, in one collective."""
    flat = keras.tree.flatten(outputs)
    scalars = [
        i
        for i, value in enumerate(flat)
        if tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating
    ]
    if scalars:
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(
            tf.distribute.ReduceOp.MEAN, tf.stack([tf.cast(flat[i], tf.float32) for i in scalars])
        )
        for i, value in zip(scalars, tf.unstack(means), strict=True):
            flat[i] = tf.cast(value, flat[i].dtype)
    return keras.tree.pack_sequence_as(outputs, flat)
