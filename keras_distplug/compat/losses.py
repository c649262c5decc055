"""Losses of the global batch, where Keras takes those of each replica's part of it.

What is wrong upstream on several replicas (Keras 3.10 to 3.15):

- `"mean_with_sample_weight"`, and any mean over a masked output, divides by the weights or valid
  steps of this replica instead of those of the global batch (0.14 off for random weights).
- A loss function that returns a scalar is not divided by the number of replicas, so that its
  gradients and its value in History are R times too large.
- An `activity_regularizer` is a sum over the samples in Keras 3.10, but divided by the number of
  replicas, and so R times too small. Newer versions divide it by the number of samples.
- Replicas are traced in turns, but what layers `add_loss` is kept on the layers, so that behind a
  layer that waits for the other replicas (a synchronized BatchNormalization) a replica finds the
  losses of another one.
- The losses of single outputs in History are means over replicas, not over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import CompileLoss

from keras_distplug.compat.model import layers_of
from keras_distplug.compat.override import mark, override
from keras_distplug.compat.share import current
from keras_distplug.core.errors import ModelError


def of_global_batch(compiled: CompileLoss) -> None:
    """Makes each of a model's compiled losses that of the global batch."""
    if not mark(compiled):
        return
    stock = compiled.build

    def build(y_true: Any, y_pred: Any) -> None:
        stock(y_true, y_pred)
        _replace(compiled)

    override(compiled, "build", build)
    if compiled.built:
        _replace(compiled)


def of_samples(loss: tf.Tensor) -> tf.Tensor:
    """`loss`, where the replica has samples. A mean over none is NaN."""
    share = current()
    return loss if share is None else tf.where(share.samples > 0, loss, tf.zeros_like(loss))


def count_by_samples(tracker: keras.metrics.Metric) -> None:
    """Makes a tracker of losses the mean over samples, where it is not told how many there are."""
    if mark(tracker):
        override(tracker, "update_state", _weighted_update(tracker.update_state, unscaled=False))


def keep_apart(model: keras.Model) -> None:
    """Keeps what the layers of `model` add to the loss with the replica that adds it."""
    for layer in (model, *layers_of(model)):
        if not isinstance(layer._losses, _AddedLosses):
            override(layer, "_losses", _AddedLosses(layer._losses))


class _AddedLosses(MutableSequence[Any]):
    """A layer's list of losses: in a step, that of the replica."""

    def __init__(self, losses: Iterable[Any]) -> None:
        self._outside = list(losses)

    def _here(self) -> list[Any]:
        share = current()
        return self._outside if share is None else share.added_losses.setdefault(id(self), [])

    def __getitem__(self, index: Any) -> Any:
        return self._here()[index]

    def __setitem__(self, index: Any, loss: Any) -> None:
        self._here()[index] = loss

    def __delitem__(self, index: Any) -> None:
        del self._here()[index]

    def __len__(self) -> int:
        return len(self._here())

    def insert(self, index: int, value: Any) -> None:
        self._here().insert(index, value)


def _replace(compiled: CompileLoss) -> None:
    compiled._flat_losses = [
        entry._replace(loss=_GlobalLoss(entry.loss, entry.name)) for entry in compiled._flat_losses
    ]
    for metric in compiled.metrics:
        override(metric, "update_state", _weighted_update(metric.update_state, unscaled=True))


def _weighted_update(stock: Callable[..., Any], *, unscaled: bool) -> Callable[..., Any]:
    def update_state(values: Any, sample_weight: Any = None) -> Any:
        share = current()
        if share is not None and sample_weight is None:
            factor = share.weight if unscaled else share.weight * share.replicas
            values = values * tf.cast(factor, values.dtype)
        return stock(values, sample_weight=sample_weight)

    return update_state


class _GlobalLoss:
    """This replica's part of a loss: the parts, each `Share.weight` times, add up to the loss."""

    def __init__(self, loss: keras.losses.Loss, output: str) -> None:
        if loss.reduction in (None, "none"):
            raise ModelError(
                f"The loss {loss.name!r} of output {output!r} has reduction={loss.reduction!r}, "
                "which gives one value a sample and so no loss of a batch that several replicas "
                'share. Use reduction="sum_over_batch_size" (the mean over samples) or "sum".'
            )
        self.name = loss.name
        self._stock = loss
        self._unreduced = object.__new__(type(loss))  # a copy would go through get_config()
        vars(self._unreduced).update(vars(loss), reduction=None)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        share = current()
        if share is None:
            return self._stock(y_true, y_pred, sample_weight)
        values = self._unreduced(y_true, y_pred, sample_weight)
        if values.shape.rank == 0:  # reduced by the function itself: taken as a mean over samples
            return of_samples(values / tf.cast(share.replicas, values.dtype))
        reduction = self._stock.reduction
        mask = backend.get_keras_mask(y_pred)
        divisor = None
        if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
            divisor = _sum_of_weights(values, sample_weight, mask)
        elif reduction != "sum" and mask is not None:
            divisor = _valid_values(values, mask)
        elif reduction != "sum":
            return self._stock(y_true, y_pred, sample_weight)
        total = tf.reduce_sum(values)
        if divisor is not None:
            whole = share.summed(tf.stop_gradient(tf.cast(divisor, tf.float32)))
            total = tf.math.divide_no_nan(total, tf.cast(whole, total.dtype))
        return total * tf.cast(tf.math.divide_no_nan(1.0, share.weight), total.dtype)


def _sum_of_weights(values: tf.Tensor, sample_weight: Any, mask: Any) -> tf.Tensor:
    """What `"mean_with_sample_weight"` divides by."""
    weights = keras_loss.apply_mask(
        None if sample_weight is None else tf.convert_to_tensor(sample_weight),
        mask,
        dtype=values.dtype,
        reduction="mean_with_sample_weight",
    )
    _, weights = keras_loss.squeeze_or_expand_to_same_rank(values, tf.cast(weights, values.dtype))
    return tf.reduce_sum(weights)


def _valid_values(values: tf.Tensor, mask: Any) -> tf.Tensor:
    """How many of `values` a mean over a masked output is taken of."""
    a_mask_value = tf.reduce_prod(tf.shape(values)[1:]) / tf.reduce_prod(tf.shape(mask)[1:])
    return tf.reduce_sum(tf.cast(mask, tf.float32)) * tf.cast(a_mask_value, tf.float32)


@contextmanager
def sums_over_samples(model: keras.Model) -> Iterator[None]:
    """Makes `activity_regularizer`s those of the global batch, while a step runs or is traced."""
    stock = {
        layer: layer.activity_regularizer
        for layer in layers_of(model)
        if layer.activity_regularizer is not None and not _activities_are_averaged()
    }
    for layer, regularizer in stock.items():
        override(layer, "activity_regularizer", _undivided(regularizer))
    try:
        yield
    finally:
        for layer, regularizer in stock.items():
            override(layer, "activity_regularizer", regularizer)


@cache
def _activities_are_averaged() -> bool:
    with tf.init_scope():
        probe = keras.layers.Identity(activity_regularizer=tf.reduce_sum)
        probe(tf.ones((2, 1)))
        return float(probe.losses[0]) == 1


def _undivided(regularizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def of_share(output: Any) -> Any:
        value, share = regularizer(output), current()
        if share is None:
            return value
        return value * tf.cast(
            tf.math.divide_no_nan(float(share.replicas), share.weight), value.dtype
        )

    return of_share
