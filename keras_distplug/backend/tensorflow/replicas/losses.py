"""Losses of the global batch, instead of those of the replicas' parts of it.

Upstream bugs with several replicas (Keras 3.10 to 3.15):

- `"mean_with_sample_weight"`, and any mean over a masked output, divides by the weights or valid
  time steps of this replica instead of those of the global batch (0.14 off for random weights).
- A loss function that returns a scalar is not divided by the number of replicas, so its gradients
  and its value in History are R times too large.
- An `activity_regularizer` is a sum over the samples in Keras 3.10, but divided by the number of
  replicas, and so R times too small. Newer versions divide it by the number of samples.
- Replicas are traced in turns, but losses added with `add_loss` are stored on the layers. After a
  layer that waits for the other replicas (a synchronized BatchNormalization), a replica therefore
  finds the losses of another one.
- The losses of single outputs in History are means over replicas, not over samples. A metric that a
  custom `train_step` updates with a loss, and a loss that such a step logs, are R times too small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import CompileLoss

from keras_distplug.backend.tensorflow.replicas.share import current
from keras_distplug.backend.tensorflow.runtime import private_names
from keras_distplug.backend.tensorflow.runtime.attached import mark
from keras_distplug.backend.tensorflow.runtime.models import list_layers
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.core.errors import ModelError

_UPSTREAM = Upstream(keras="3.10 to 3.15")


def use_global_batch(compiled: CompileLoss) -> None:
    """Makes all compiled losses of a model those of the global batch."""
    if not mark(compiled):
        return
    stock = compiled.build

    def build(y_true: Any, y_pred: Any) -> None:
        stock(y_true, y_pred)
        _replace(compiled)

    _UPSTREAM.patch(compiled, "build", build)
    if compiled.built:
        _replace(compiled)


def zero_without_samples(loss: tf.Tensor) -> tf.Tensor:
    """Returns `loss` if the replica has samples, otherwise 0: a mean over no samples is NaN."""
    share = current()
    return loss if share is None else tf.where(share.has_samples, loss, tf.zeros_like(loss))


def weight_by_samples(tracker: keras.metrics.Metric) -> None:
    """Makes a tracker of losses compute the mean over samples if it gets no sample weights."""
    if mark(tracker):
        _UPSTREAM.patch(
            tracker, "update_state", _weighted_update(tracker.update_state, unscaled=False)
        )


def average_over_batches(metric: keras.metrics.Metric) -> None:
    """Makes a `Mean` that a custom step updates with a loss compute its mean over batches."""
    if type(metric) is not keras.metrics.Mean or not mark(metric):
        return
    stock = metric.update_state

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        share = current()
        if share is None or not _is_a_loss(values):
            return stock(values, sample_weight)
        if sample_weight is not None:
            return stock(values * tf.cast(share.replicas, values.dtype), sample_weight)
        return stock(scale_to_global(values), 1 / share.replicas)

    _UPSTREAM.patch(metric, "update_state", update_state)


def scale_to_global(value: Any) -> Any:
    """Scales a loss of this step so that the mean over replicas is the global loss; returns any
    other value unchanged."""
    share = current()
    if share is None or not _is_a_loss(value):
        return value
    return value * tf.cast(share.weight * share.replicas, value.dtype)


def _is_a_loss(value: Any) -> bool:
    share = current()
    return share is not None and any(value is loss for loss in share.losses)


@contextmanager
def recorded() -> Iterator[None]:
    """Records the losses that a step computes."""
    stock = keras_loss.scale_loss_for_distribution
    with _UPSTREAM.patched(keras_loss, "scale_loss_for_distribution", recording(stock)):
        yield


def recording(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute_loss)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        if (share := current()) is not None:
            share.losses.append(loss)
        return loss

    return recorded


def separate_added_losses(model: keras.Model) -> None:
    """Keeps losses that the layers of `model` add separate for every replica."""
    for layer in (model, *list_layers(model)):
        if not isinstance(layer._losses, _AddedLosses):
            _UPSTREAM.patch(layer, "_losses", _AddedLosses(layer._losses))


class _AddedLosses(MutableSequence[Any]):
    """A layer's list of losses; within a step, the replica's own list."""

    def __init__(self, losses: Iterable[Any]) -> None:
        self._outside = list(losses)

    def _current_list(self) -> list[Any]:
        share = current()
        return self._outside if share is None else share.added_losses.setdefault(id(self), [])

    def __getitem__(self, index: Any) -> Any:
        return self._current_list()[index]

    def __setitem__(self, index: Any, loss: Any) -> None:
        self._current_list()[index] = loss

    def __delitem__(self, index: Any) -> None:
        del self._current_list()[index]

    def __len__(self) -> int:
        return len(self._current_list())

    def insert(self, index: int, value: Any) -> None:
        self._current_list().insert(index, value)


def _replace(compiled: CompileLoss) -> None:
    compiled._flat_losses = [
        entry._replace(loss=_GlobalLoss(entry.loss, entry.name)) for entry in compiled._flat_losses
    ]
    for metric in compiled.metrics:
        _UPSTREAM.patch(
            metric, "update_state", _weighted_update(metric.update_state, unscaled=True)
        )


def _weighted_update(stock: Callable[..., Any], *, unscaled: bool) -> Callable[..., Any]:
    def update_state(values: Any, sample_weight: Any = None) -> Any:
        share = current()
        if share is not None and sample_weight is None:
            factor = share.weight if unscaled else share.weight * share.replicas
            values = values * tf.cast(factor, values.dtype)
        return stock(values, sample_weight=sample_weight)

    return update_state


class _GlobalLoss:
    """This replica's part of a loss. The sum of all parts, times `Share.weight`, is the loss."""

    def __init__(self, loss: keras.losses.Loss, output: str) -> None:
        if loss.reduction in (None, "none"):
            raise ModelError(
                f"The loss {loss.name!r} of output {output!r} has reduction={loss.reduction!r}, "
                "which returns one value per sample, but training on replicas needs a single value "
                'per batch. Use reduction="sum_over_batch_size" (the mean over samples) or "sum".'
            )
        _refuse_what_mixes_samples(loss, output)
        self.name = loss.name
        self._stock = loss

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        share = current()
        if share is None:
            return self._stock(y_true, y_pred, sample_weight)
        values, mask = self._unreduced(y_true, y_pred, sample_weight)
        if values.shape.rank == 0:  # reduced by the function itself: treated as a mean over samples
            return zero_without_samples(values / tf.cast(share.replicas, values.dtype))
        reduction = self._stock.reduction
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

    def _unreduced(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Returns the weighted values before reduction, and the mask of those that count; None if
        all count."""
        masks = [private_names.get_keras_mask(y_pred)]

        def call(y_true: Any, y_pred: Any) -> Any:
            values = self._stock.call(y_true, y_pred)
            masks.append(private_names.get_keras_mask(values))  # `ignore_class`
            return values

        loss = object.__new__(type(self._stock))  # a copy would go through get_config()
        vars(loss).update(vars(self._stock), reduction=None, call=call)
        values = loss(y_true, y_pred, sample_weight)
        given = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
        return values, functools.reduce(tf.logical_and, given) if given else None


def _refuse_what_mixes_samples(loss: keras.losses.Loss, output: str) -> None:
    function = getattr(loss, "fn", None)
    axis = getattr(loss, "_fn_kwargs", {}).get("axis")
    over_batch = axis is None or 0 in keras.tree.flatten(axis)
    if function is keras.losses.circle:
        instead = "Train on one device"
    elif function in (keras.losses.dice, keras.losses.tversky) and over_batch:
        instead = (
            "Pass axis=(1, 2, 3) to the loss, or the axes that a sample has, or train on one device"
        )
    else:
        return
    raise ModelError(
        f"The loss {loss.name!r} of output {output!r} combines all samples of a batch, but a "
        f"replica only has some of them. {instead}."
    )


def _sum_of_weights(values: tf.Tensor, sample_weight: Any, mask: Any) -> tf.Tensor:
    """Returns the divisor of `"mean_with_sample_weight"`."""
    weights = keras_loss.apply_mask(
        None if sample_weight is None else tf.convert_to_tensor(sample_weight),
        mask,
        dtype=values.dtype,
        reduction="mean_with_sample_weight",
    )
    _, weights = keras_loss.squeeze_or_expand_to_same_rank(values, tf.cast(weights, values.dtype))
    return tf.reduce_sum(weights)


def _valid_values(values: tf.Tensor, mask: Any) -> tf.Tensor:
    """Returns the number of `values` that a mean over a masked output includes."""
    a_mask_value = tf.reduce_prod(tf.shape(values)[1:]) / tf.reduce_prod(tf.shape(mask)[1:])
    return tf.reduce_sum(tf.cast(mask, tf.float32)) * tf.cast(a_mask_value, tf.float32)


@contextmanager
def sums_over_samples(model: keras.Model) -> Iterator[None]:
    """Makes `activity_regularizer`s use the global batch while a step is traced or run."""
    with ExitStack() as stack:
        for layer in list_layers(model):
            regularizer = layer.activity_regularizer
            if regularizer is not None and not _activities_are_averaged():
                stack.enter_context(
                    _UPSTREAM.patched(layer, "activity_regularizer", _undivided(regularizer))
                )
        yield


@cache
def _activities_are_averaged() -> bool:
    with tf.init_scope():
        probe = keras.layers.Identity(activity_regularizer=tf.reduce_sum)
        probe(tf.ones((2, 1)))
        return float(probe.losses[0]) == 1


def _undivided(regularizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def undivided(output: Any) -> Any:
        value, share = regularizer(output), current()
        if share is None:
            return value
        return value * tf.cast(
            tf.math.divide_no_nan(float(share.replicas), share.weight), value.dtype
        )

    return undivided
