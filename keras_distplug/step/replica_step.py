"""A step as one replica takes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas import gates, share
from keras_distplug.backend.tensorflow.replicas.gates import dense
from keras_distplug.backend.tensorflow.runtime.current import Current


class ReplicaStep:
    """The training step of one replica, as tensors of its trace. Instruments receive it.

    `carried` is a dictionary for tensors that a hook passes to `after`.

    Args:
        batch: The replica's part of the batch.
        is_compiled: Whether XLA compiles everything between `before` and `after`, where Python
            functions cannot be called.
    """

    def __init__(self, batch: Any, is_compiled: bool) -> None:
        self.batch = batch
        self.is_compiled = is_compiled
        self.carried: dict[str, Any] = {}  # tensors for `after`, out of what XLA compiles
        self.notes: dict[Any, Any] = {}  # an instrument's own, while the step is traced
        self.allowed: list[tf.Tensor] = []  # whether each update so far is applied
        self._losses: list[tf.Tensor] = []
        self._half_squares: dict[int, tuple[Any, tf.Tensor]] = {}

    @property
    def replica(self) -> Any:
        """The replica's number among all replicas of all workers: a tensor, or an int."""
        return tf.distribute.get_replica_context().replica_id_in_sync_group

    @property
    def is_one_of_several(self) -> bool:
        return bool(tf.distribute.get_replica_context().num_replicas_in_sync > 1)

    @property
    def losses(self) -> list[tf.Tensor]:
        """What `compute_loss` has given, as far as it is of the function that is being traced."""
        return [loss for loss in self._losses if gates.is_here(loss)]

    def note_loss(self, loss: tf.Tensor) -> None:
        self._losses.append(loss)

    def loss(self) -> tf.Tensor:
        """The mean loss of this replica's samples; 0 if the step does not use `compute_loss`."""
        if not self.losses:
            return tf.zeros([])
        together = share.current()
        # Keras divides a replica's loss by their number.
        replicas = 1 if together is None else together.replicas
        return tf.reduce_sum([tf.cast(loss, tf.float32) * replicas for loss in self.losses])

    def loss_of_all(self) -> tf.Tensor:
        """The mean of all samples' losses, on all replicas."""
        together = share.current()
        if together is None:
            return self.loss()
        part = tf.where(together.has_samples, together.samples * self.loss(), 0.0)
        return together.summed(part) / together.total

    def samples(self) -> tf.Tensor:
        """How many samples this replica's part of the batch has."""
        together = share.current()
        return share.samples_of(self.batch) if together is None else together.samples

    def plain_data(self) -> list[tf.Tensor]:
        """The dense tensors of the batch."""
        flat = tf.nest.flatten(self.batch)
        return [each for each in flat if isinstance(each, tf.Tensor) and gates.is_here(each)]

    def norm(self, gradients: Sequence[Any]) -> tf.Tensor:
        """The global norm. Reading a gradient takes as long as everything else that instruments
        do, so each is read once."""
        halves = []
        for gradient in gradients:
            if gradient is None:
                continue
            _, half = self._half_squares.get(id(gradient), (None, None))
            if half is None or not gates.is_here(half):
                half = _half_square(gradient)
                self._half_squares[id(gradient)] = gradient, half
            halves.append(half)
        return tf.sqrt(2 * tf.add_n(halves))

    def norm_of_sum(self, summed: Sequence[Any]) -> tf.Tensor:
        """The global norm of gradients that all replicas have the same."""
        if not self.is_one_of_several:
            return self.norm(summed)
        context = tf.distribute.get_replica_context()
        present = [dense(gradient) for gradient in summed if gradient is not None]
        return gates.of_first(
            context, lambda each: tf.sqrt(2 * tf.add_n([*map(_half_square, each)])), present
        )


def size_of(gradient: Any) -> float:
    """How many values a gradient has; infinite if that is not known."""
    shape = dense(gradient).shape
    return math.inf if shape.rank is None or None in shape else math.prod(shape)


def scales_loss(optimizer: keras.optimizers.Optimizer) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _half_square(gradient: Any) -> tf.Tensor:
    return tf.nn.l2_loss(tf.cast(dense(gradient), tf.float32))


tracing: Current[ReplicaStep] = Current()
