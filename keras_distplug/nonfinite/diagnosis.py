"""Recomputes a batch layer by layer, to find the first non-finite value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas import probe
from keras_distplug.nonfinite import batches


@dataclass(frozen=True)
class Diagnosis:
    """The result of recomputing a step of one batch.

    Args:
        origin: The first non-finite value on the way from the data to the gradients; None if loss
            and gradients are finite.
        loss: The loss; None if the step does not compute it with `compute_loss`.
        variables: The paths of variables whose gradients are not finite.
    """

    origin: str | None
    loss: float | None
    variables: tuple[str, ...]

    @property
    def is_finite(self) -> bool:
        return self.origin is None


def diagnose(
    model: keras.Model, batch: Any, train_step: Callable[[Any], Any] | None = None
) -> Diagnosis:
    """Computes a step of `batch` without changing the model.

    The step runs eagerly, on this replica only, and random layers draw the numbers that they would
    draw in the next step. Side effects of the step other than on Keras variables are not undone.

    Args:
        model: A compiled and built model.
        batch: The argument of its `train_step`, as arrays.
        train_step: The step. Defaults to that of `model`.
    """
    step = _Step(model)
    with (
        probe.isolate_replica(model),
        probe.listening(model, step.on_call, step.on_loss, step.on_gradients),
    ):
        (train_step or model.train_step)(tf.nest.map_structure(_as_tensor, batch))
    is_finite = step.is_loss_finite and not step.variables
    return Diagnosis(
        None if is_finite else _origin(model, batch, step),
        sum(step.losses) if step.losses else None,
        tuple(dict.fromkeys(step.variables)),
    )


@dataclass
class _Step:
    """Observations made during a step."""

    model: keras.Model
    layer: str | None = None  # the first one with a non-finite output
    losses: list[float] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)

    @property
    def is_loss_finite(self) -> bool:
        return all(map(math.isfinite, self.losses))

    def on_call(self, layer: keras.Layer, given: Any, made: Any) -> None:
        if self.layer is not None or _is_finite(made):
            return
        # A name is clearer than a path, which starts with the model's name.
        name = f"layer `{layer.name}` ({type(layer).__name__})"
        if _is_finite(given):
            self.layer = f"the output of {name}, although its inputs are finite"
        else:
            self.layer = f"the input of {name}, although the outputs of earlier layers are finite"

    def on_loss(self, loss: Any) -> None:
        if loss is not None:
            self.losses.append(float(loss))

    def on_gradients(
        self, optimizer: str, gradients: Sequence[Any], variables: Sequence[keras.Variable]
    ) -> None:
        # If the loss is scaled, gradients may overflow for that reason alone.
        of_model = getattr(self.model, optimizer)
        if isinstance(of_model, keras.optimizers.LossScaleOptimizer) and self.is_loss_finite:
            return
        self.variables += [
            variable.path
            for variable, gradient in zip(variables, gradients, strict=True)
            if gradient is not None and not _is_finite(gradient)
        ]


def _origin(model: keras.Model, batch: Any, step: _Step) -> str:
    for name, value in _named_arrays(batch).items():
        if not _is_finite(value):
            return f"the batch ({_count_nonfinite(name, np.asarray(value))})"
    for variable in model.variables:
        if not _is_finite(variable.value):
            return f"the variable `{variable.path}`"
    if step.layer is not None:
        return step.layer
    if not step.is_loss_finite:
        return "the loss, although the outputs are finite"
    return f"the gradient of `{step.variables[0]}`, although the loss is finite"


def _named_arrays(batch: Any) -> dict[str, Any]:
    try:
        return batches.split_batch(batch)[1]
    except TypeError:
        flat = tf.nest.flatten(batch)
        return {f"array {i}": value for i, value in enumerate(flat) if value is not None}


def _count_nonfinite(name: str, value: np.ndarray) -> str:
    bad = ~np.isfinite(value)
    first = np.argwhere(bad)[0]
    sample = f", first in sample {first[0] + 1} of {len(value)}" if value.ndim else ""
    return f"{np.count_nonzero(bad)} of {value.size} values in `{name}` are not finite{sample}"


def _as_tensor(value: Any) -> Any:
    return None if value is None else tf.convert_to_tensor(value)


def _is_finite(values: Any) -> bool:
    flat = tf.nest.flatten(values, expand_composites=True)
    tensors = [tf.convert_to_tensor(each) for each in flat if _is_inexact(each)]
    return all(bool(tf.reduce_all(_are_finite(each))) for each in tensors)


def _is_inexact(value: Any) -> bool:
    if not (isinstance(value, np.ndarray | np.generic) or tf.is_tensor(value)):
        return isinstance(value, float | complex)
    dtype = tf.as_dtype(value.dtype)
    return bool(dtype.is_floating or dtype.is_complex)


def _are_finite(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_complex:
        return tf.math.is_finite(tf.math.real(value)) & tf.math.is_finite(tf.math.imag(value))
    return tf.math.is_finite(value)
