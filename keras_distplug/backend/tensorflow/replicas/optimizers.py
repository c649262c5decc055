"""Optimizers that see the gradients of the global batch.

Upstream bugs with several replicas (Keras 3.10 to 3.15):

- `apply` clips every replica's gradients before they are summed instead of afterwards, and checks
  if they are finite on every replica separately (a hang, or NaN, if a loss scale overflows on one).
- `gradient_accumulation_steps` and `ema_overwrite_frequency` update variables inside a `tf.cond` of
  one replica, which raises: TensorFlow updates in the context of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas import gates
from keras_distplug.backend.tensorflow.replicas.gates import cond_over_replicas
from keras_distplug.backend.tensorflow.replicas.share import current
from keras_distplug.backend.tensorflow.runtime.attached import mark
from keras_distplug.backend.tensorflow.runtime.models import get_inner_optimizer
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(keras="3.10 to 3.15")


def use_global_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Weights every replica by its samples, and sums gradients before they are processed further.

    The weight is applied to the loss, because a layer that communicates with other replicas, such
    as synchronized BatchNormalization, sends gradients to them. If a custom `train_step` does not
    call `optimizer.scale_loss`, gradients are weighted instead.
    """
    if not mark(optimizer):
        return
    inner = get_inner_optimizer(optimizer)
    stock_apply = optimizer.apply
    stock_scale_loss = optimizer.scale_loss

    def scale_loss(loss: Any) -> Any:
        if (share := current()) is not None:
            loss = loss * tf.cast(share.weight, loss.dtype)
            share.in_loss.add(id(optimizer))
        return stock_scale_loss(loss)

    def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
        context = tf.distribute.get_replica_context()
        own = summed = list(grads)
        if context is not None:
            share = current()
            weight = None if share is None or id(optimizer) in share.in_loss else share.weight
            summed = _summed(gates.marked(optimizer, own), weight, context)
        return gates.apply(optimizer, stock_apply, own, summed, trainable_variables)

    _UPSTREAM.patch(optimizer, "scale_loss", scale_loss)
    _UPSTREAM.patch(optimizer, "apply", apply)
    _UPSTREAM.patch(inner, "_all_reduce_sum_gradients", list)
    _UPSTREAM.patch(inner, "_backend_apply_gradients", _apply_over_replicas(inner))


def add_gate(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the optimizer of a single replica call its gate."""
    if not mark(optimizer):
        return
    stock = optimizer.apply

    def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
        own = list(grads)
        marked = gates.marked(optimizer, own)
        return gates.apply(optimizer, stock, own, marked, trainable_variables)

    _UPSTREAM.patch(optimizer, "apply", apply)


def _apply_over_replicas(optimizer: Any) -> Callable[..., None]:
    """Returns a `_backend_apply_gradients` that evaluates its conditions in the context of all
    replicas."""
    stock = optimizer._backend_apply_gradients

    def _backend_apply_gradients(grads: Iterable[Any], trainable_variables: Iterable[Any]) -> None:
        context = tf.distribute.get_replica_context()
        every = optimizer.gradient_accumulation_steps
        overwrite_every = optimizer.ema_overwrite_frequency if optimizer.use_ema else None
        if context is None or not (every or overwrite_every):
            stock(grads, trainable_variables)
            return
        grads, variables = list(grads), list(trainable_variables)

        def update(grads: Sequence[Any]) -> None:
            clipped = optimizer._clip_gradients(list(grads))
            optimizer._apply_weight_decay(variables)
            optimizer._backend_update_step(clipped, variables, optimizer.learning_rate)

        if every:
            held = [
                optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]
                for variable in variables
            ]

            def update_with_held(grads: Sequence[Any]) -> None:
                update([(grad + one) / every for grad, one in zip(grads, held, strict=True)])
                optimizer._backend_reset_gradient_accumulators()

            def hold(grads: Sequence[Any]) -> None:
                optimizer._backend_increment_gradient_accumulators(grads, held)

            due = (optimizer._iterations + 1) % every == 0
            cond_over_replicas(context, due, update_with_held, hold, grads)
        else:
            update(grads)
        if optimizer.use_ema:
            trained = optimizer._trainable_variables
            optimizer._update_model_variables_moving_average(trained)
            if overwrite_every:
                due = (optimizer.iterations + 1) % overwrite_every == 0
                _overwrite_with_average(context, due, optimizer)

    return _backend_apply_gradients


def _overwrite_with_average(
    context: tf.distribute.ReplicaContext, condition: tf.Tensor, optimizer: Any
) -> None:
    def overwrite() -> None:
        optimizer._overwrite_model_variables_with_average_value(optimizer._trainable_variables)

    def merged(strategy: tf.distribute.Strategy, condition: Any) -> None:
        first = strategy.experimental_local_results(condition)[0]  # the same on all
        tf.cond(first, overwrite, lambda: None)

    context.merge_call(merged, args=(condition,))


def _summed(
    grads: Sequence[Any], weight: tf.Tensor | None, context: tf.distribute.ReplicaContext
) -> list[Any]:
    """Sums `grads`, multiplied by the replica's `weight`, over all replicas; None stays None."""
    present = [grad for grad in grads if grad is not None]
    if not present:
        return list(grads)
    weighted = present if weight is None else [_scaled(grad, weight) for grad in present]
    summed = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, weighted))
    return [None if grad is None else next(summed) for grad in grads]


def _scaled(grad: Any, factor: tf.Tensor) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
