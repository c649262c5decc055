"""A training step of one replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
        is_compiled: True if XLA compiles everything between `before` and `after`, so that Python
            functions cannot be called there.
    """

    def __init__(self, batch: Any, is_compiled: bool) -> None:
        self.batch = batch
        self.is_compiled = is_compiled
        self.carried: dict[str, Any] = {}  # tensors for `after`, returned by the XLA computation
        self.notes: dict[Any, Any] = {}  # for instruments to use while the step is traced
        self.allowed: list[tf.Tensor] = []  # per update so far: True if it is applied
        self._graph = _get_graph()
        self._if_skipped: list[tuple[tf.Tensor, Callable[[], Any]]] = []
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
    def is_in_function(self) -> bool:
        """True if the caller is traced as part of another function within the step."""
        return _get_graph() is not self._graph

    @property
    def losses(self) -> list[tf.Tensor]:
        """The results of `compute_loss` that belong to the function being traced."""
        return [loss for loss in self._losses if gates.is_here(loss)]

    def note_loss(self, loss: tf.Tensor) -> None:
        self._losses.append(loss)

    def loss(self) -> tf.Tensor:
        """Returns the mean loss of this replica's samples; 0 if the step has no `compute_loss`."""
        if not self.losses:
            return tf.zeros([])
        together = share.current()
        # Keras divides the loss of every replica by the number of replicas.
        replicas = 1 if together is None else together.replicas
        total = tf.add_n([_sum(tf.cast(loss, tf.float32)) for loss in self.losses])
        return total if replicas == 1 else total * replicas

    def loss_of_all(self) -> tf.Tensor:
        """Returns the mean loss over the samples of all replicas."""
        together = share.current()
        if together is None:
            return self.loss()
        part = tf.where(together.has_samples, together.samples * self.loss(), 0.0)
        return together.summed(part) / together.total

    def samples(self) -> tf.Tensor:
        """Returns the number of samples in this replica's part of the batch."""
        together = share.current()
        return share.count_samples(self.batch) if together is None else together.samples

    def plain_data(self) -> list[tf.Tensor]:
        """Returns the dense tensors of the batch."""
        flat = tf.nest.flatten(self.batch)
        return [each for each in flat if isinstance(each, tf.Tensor) and gates.is_here(each)]

    def norm(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Returns the global norm.

        Reading a gradient costs as much as everything else that instruments do, so every gradient
        is read only once.

        Args:
            gradients: One gradient per variable. `None` is ignored.
        """
        return tf.sqrt(2 * self._half_square(gradients))

    def _half_square(self, gradients: Sequence[Any]) -> tf.Tensor:
        halves = []
        for gradient in gradients:
            if gradient is None:
                continue
            _, half = self._half_squares.get(id(gradient), (None, None))
            if half is None or not gates.is_here(half):
                half = _half_square(gradient)
                self._half_squares[id(gradient)] = gradient, half
            halves.append(half)
        return tf.add_n(halves)

    def norm_of_sum(self, summed: Sequence[Any]) -> tf.Tensor:
        """Returns the global norm of gradients that are identical on all replicas.

        Args:
            summed: One gradient per variable, as passed to `after_sum`. `None` is ignored.
        """
        return tf.sqrt(2 * self.half_square_of_sum(summed))

    def half_square_of_sum(self, summed: Sequence[Any]) -> tf.Tensor:
        """Returns half the square of `norm_of_sum`."""
        if not self.is_one_of_several:
            return self._half_square(summed)
        context = tf.distribute.get_replica_context()
        present = [dense(gradient) for gradient in summed if gradient is not None]
        return gates.compute_once(
            context, lambda each: tf.add_n([*map(_half_square, each)]), present
        )

    def call_if_skipped(self, allowed: tf.Tensor, function: Callable[[], Any]) -> None:
        """Builds the operations of `function` such that they run only if `allowed` is false.

        Args:
            allowed: A boolean scalar: true if an update of this step is applied.
            function: A function without arguments.
        """
        # TensorFlow would not keep conditions that use variables in the order of the replicas.
        if self.is_in_function or self.is_one_of_several:
            call_unless(allowed, function)
        else:
            self._if_skipped.append((allowed, function))

    def undo_if_skipped(self, assigned: gates.Assigned) -> None:
        """Builds the operations at the end of a step that run only if an update was skipped.

        There is one condition for all of them, because a condition takes time to trace and to run.

        Args:
            assigned: The assignments to undo.
        """
        allowed = [each for each in self.allowed if gates.is_here(each)]
        if not allowed:
            return
        every = allowed[0] if len(allowed) == 1 else tf.reduce_all(tf.stack(allowed))
        changed = assigned.list_previous()

        def undo() -> None:
            for one, function in self._if_skipped:
                function() if one is every else call_unless(one, function)
            for variable, before in changed:
                variable.assign(before)

        if changed or self._if_skipped:
            call_unless(every, undo)


def get_size(gradient: Any) -> float:
    """Returns the number of values in a gradient; infinity if unknown."""
    shape = dense(gradient).shape
    return math.inf if shape.rank is None or None in shape else math.prod(shape)


def scales_loss(optimizer: keras.optimizers.Optimizer) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _get_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def call_unless(condition: tf.Tensor, function: Callable[[], Any]) -> None:
    """Builds the operations of `function` such that they run only if `condition` is false."""

    def call() -> None:
        function()

    tf.cond(condition, lambda: None, call)


def _sum(loss: tf.Tensor) -> tf.Tensor:
    return loss if loss.shape.rank == 0 else tf.reduce_sum(loss)


def _half_square(gradient: Any) -> tf.Tensor:
    return tf.nn.l2_loss(tf.cast(dense(gradient), tf.float32))


tracing: Current[ReplicaStep] = Current()
