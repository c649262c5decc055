"""State that replicas change during a step: statistics, seeds, and central storage.

Upstream bugs with several replicas (Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21):

- BatchNormalization's moving statistics differ between replicas: their aggregation is NONE. A
  replica without samples (a tail smaller than the number of replicas) makes them NaN.
- The state of a seed generator is the same on every replica, so all replicas drop the same units.
- Under CentralStorageStrategy, replicas share one variable: variables without an aggregation
  cannot be assigned, and metrics that `assign` count the state once per replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.share import Share, current
from keras_distplug.backend.tensorflow.runtime.attached import mark
from keras_distplug.backend.tensorflow.runtime.models import (
    all_variables,
    list_layers,
    list_optimizers,
    list_seed_generators,
)
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(keras="3.10 to 3.15", tensorflow="2.18 to 2.21")


def share_state(model: keras.Model) -> None:
    """Merges the replicas' changes to the state of `model`. Call it again for new variables."""
    central = isinstance(
        model.distribute_strategy, tf.distribute.experimental.CentralStorageStrategy
    )
    statistics = {id(v) for v in model.non_trainable_variables if _is_statistic(v)}
    conditional = {
        id(variable)
        for optimizer in list_optimizers(model).values()
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        for variable in optimizer._variables
    }
    for variable in all_variables(model):
        if id(variable) in statistics and mark(variable):
            (_average_centrally if central else _record_when_assigned)(variable)
        elif central and mark(variable):
            integer = tf.as_dtype(variable.dtype).is_integer
            if _aggregation(variable) == tf.VariableAggregation.SUM:
                _add_centrally(variable)
            elif _aggregation(variable) == tf.VariableAggregation.NONE:
                _assign_centrally(variable, at_once=integer or id(variable) in conditional)
    separate_streams(model, _replica)
    for layer in (model, *list_layers(model)):
        if isinstance(layer, keras.layers.BatchNormalization) and mark(layer):
            _UPSTREAM.patch(layer, "_moments", _make_moments(layer))


def merge_statistics(share: Share) -> None:
    """Assigns the mean over samples of the statistics that this step has changed to all replicas.

    Moving statistics are linear in those of a batch, so they can be averaged after any number of
    assignments. One collective per dtype is used, because TensorFlow packs small tensors badly.
    """
    for dtype in sorted({variable.dtype for variable in share.touched.values()}):
        variables = [v for v in share.touched.values() if v.dtype == dtype]
        flat = [tf.reshape(_part(v._value, share), [-1]) for v in variables]
        mean = share.summed(tf.concat(flat, axis=0))
        parts = tf.split(mean, [part.shape[0] for part in flat])
        for variable, part in zip(variables, parts, strict=True):
            variable._value.assign(tf.reshape(part, variable.shape))
    share.touched.clear()


def _is_statistic(variable: keras.Variable) -> bool:
    dtype = tf.as_dtype(variable.dtype)
    return bool(dtype.is_floating) and _aggregation(variable) == tf.VariableAggregation.NONE


def _aggregation(variable: keras.Variable) -> Any:
    return getattr(variable._value, "_aggregation", None)


def _part(value: Any, share: Share) -> tf.Tensor:
    """Returns a replica's contribution to a mean over samples; 0 if it has no samples, since it may
    have computed NaN."""
    value = tf.convert_to_tensor(value)
    part = tf.cast(share.samples / share.total, value.dtype)
    return tf.where(share.has_samples, value * part, tf.zeros_like(value))


def _make_moments(layer: keras.layers.BatchNormalization) -> Callable[..., Any]:
    stock = layer._moments

    def _moments(inputs: Any, mask: Any) -> Any:
        share = current()
        if share is None:
            return stock(inputs, mask)
        if layer.synchronized and mask is None:
            return _moments_on_all(inputs, layer.axis, share)
        # Without samples, the statistics would be NaN, and so would the gradients that use them.
        mean, variance = stock(inputs, mask)
        mean = tf.where(share.has_samples, mean, tf.zeros_like(mean))
        return mean, tf.where(share.has_samples, variance, tf.ones_like(variance))

    return _moments


def _moments_on_all(inputs: tf.Tensor, axis: int, share: Share) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance over all replicas as Keras computes them, but in one collective.
    Keras uses three, and three more for the gradients."""
    axis %= len(inputs.shape)
    others = [i for i in range(len(inputs.shape)) if i != axis]
    features = inputs.shape[axis]
    count = tf.cast(tf.size(inputs) // features, inputs.dtype)
    sums = [tf.reduce_sum(inputs, others), tf.reduce_sum(tf.square(inputs), others), [count]]
    total, squares, count = tf.split(share.summed(tf.concat(sums, 0)), [features, features, 1])
    mean = tf.math.divide_no_nan(total, count)
    return mean, tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0)


def _record_when_assigned(variable: keras.Variable) -> None:
    stock = variable._direct_assign

    def _direct_assign(value: Any) -> None:
        stock(value)
        if (share := current()) is not None:
            share.touched[id(variable)] = variable

    _UPSTREAM.patch(variable, "_direct_assign", _direct_assign)


def _average_centrally(variable: keras.Variable) -> None:
    stock = variable._direct_assign
    variable._value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA

    def _direct_assign(value: Any) -> None:
        share = current()
        stock(value if share is None else share.summed(_part(value, share)))

    _UPSTREAM.patch(variable, "_direct_assign", _direct_assign)


def _add_centrally(variable: keras.Variable) -> None:
    """Adds every replica's change, which under other strategies is added to its own copy."""
    stock = variable._direct_assign
    central = variable._value

    def _direct_assign(value: Any) -> None:
        if current() is None:
            stock(value)
        else:
            central.assign_add(tf.cast(value, central.dtype) - central)

    _UPSTREAM.patch(variable, "_direct_assign", _direct_assign)


def _assign_centrally(variable: keras.Variable, *, at_once: bool) -> None:
    """Assigns the first replica's value, assuming that all replicas assign the same.

    `at_once` assigns it without waiting for the other replicas, which is impossible in a `tf.cond`.
    """
    stock = variable._direct_assign
    central = variable._value
    central._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA

    def _direct_assign(value: Any) -> None:
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1 or not at_once:
            stock(value)
        elif tf.get_static_value(context.replica_id_in_sync_group) == 0:
            central.get().assign(tf.cast(value, central.dtype))

    _UPSTREAM.patch(variable, "_direct_assign", _direct_assign)


def separate_streams(model: keras.Model, stream: Callable[[], tf.Tensor | None]) -> None:
    """Draws the seeds of `model` from a separate random stream per number returned by `stream`;
    None uses the common stream. The saved state is the same for all streams."""
    for generator in list_seed_generators(model):
        if mark(generator):
            _UPSTREAM.patch(generator, "next", _make_next(generator.next, stream))


def _make_next(stock: Callable[..., Any], stream: Callable[[], tf.Tensor | None]) -> Any:
    def next_seed(ordered: bool = True) -> Any:
        seed, number = stock(ordered=ordered), stream()
        if number is None:
            return seed
        folded = tf.random.experimental.stateless_fold_in(tf.cast(seed, tf.int64), number)
        return tf.cast(folded, seed.dtype)

    return next_seed


def _replica() -> tf.Tensor | None:
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return tf.cast(context.replica_id_in_sync_group, tf.int64)
