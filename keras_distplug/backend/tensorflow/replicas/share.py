"""This replica's part of the global batch.

Keras scales the loss of every replica by 1/R, where R is the number of replicas, and sums the
gradients. The result is the mean over the global batch of N samples only if every replica has N/R
samples; a replica with n samples must be weighted by `weight` = R * n / N. Losses and loss metrics
are therefore multiplied by `weight` in sums over replicas; values that are not means over samples
are divided by it first (`losses.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime.current import Current


class Share:
    """One replica's part of a step's global batch, as tensors of the trace of that step.

    Args:
        data: The replica's part of the batch.
        total: The number of samples in the global batch.
    """

    def __init__(self, data: Any, total: tf.Tensor) -> None:
        self.samples = count_samples(data)
        self.has_samples = self.samples > 0
        self.in_loss: set[int] = set()  # optimizers that have weighted a loss, not its gradients
        self.touched: dict[int, keras.Variable] = {}  # statistics that this step has assigned
        self.results: list[Any] = []  # of metrics, which the step may log
        self.losses: list[Any] = []  # which the step may log or update a metric with
        self.at_end: list[Callable[[], None]] = []  # called after the merge of replica states
        self.added_losses: dict[int, list[Any]] = {}  # by the layer that has added them
        self.total = total
        self._context = tf.distribute.get_replica_context()

    @property
    def replicas(self) -> int:
        return int(self._context.num_replicas_in_sync)

    @property
    def weight(self) -> tf.Tensor:
        return self.samples * self.replicas / self.total

    def summed(self, value: Any) -> Any:
        """Returns the sum over all replicas."""
        return self._context.all_reduce(tf.distribute.ReduceOp.SUM, value)


_current: Current[Share] = Current()


@contextmanager
def use_share(data: Any, total: tf.Tensor) -> Iterator[Share]:
    """Makes the share of `data` the current one within the `with` block."""
    share = Share(data, total)
    with _current.at(share):
        yield share


def current() -> Share | None:
    return _current.now


def first_tensor(batch: Any) -> Any:
    return next(value for value in keras.tree.flatten(batch) if value is not None)


def count_samples(batch: Any) -> tf.Tensor:
    """The number of samples in a batch, as a float."""
    first = first_tensor(batch)
    if isinstance(first, tf.RaggedTensor):
        count = first.nrows()
    elif isinstance(first, tf.SparseTensor):
        count = first.dense_shape[0]
    else:
        count = tf.shape(first)[0]
    return tf.cast(count, tf.float32)
