"""Variables with a separate value on every replica, such as those of metrics.

Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21. Reading such a variable sums it over the replicas,
which with several workers is a collective. Access to this process's own parts is private.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from keras_distplug.backend.tensorflow.replicas import touched
from keras_distplug.backend.tensorflow.runtime.models import (
    all_variables,
    compile_arguments,
    random_state_kept,
)
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.backend.tensorflow.runtime.reading import read_by_reference

_UPSTREAM = Upstream(keras="3.10 to 3.15", tensorflow="2.18 to 2.21")


def own_of_replicas(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of `model` whose values may differ by replica, in Keras' order."""
    metrics = {id(variable) for variable in model.metrics_variables}
    return [
        variable
        for variable in all_variables(model)
        if id(variable) in metrics or variable.synchronization == "on_read"
    ]


def build(model: keras.Model, element_spec: Any) -> None:
    """Creates the variables of metrics as the first step would.

    Keras' `_symbolic_build` calls the model in inference mode, where the structure of its outputs
    may be different.

    Args:
        model: A built model.
        element_spec: The structure of a batch of its data.
    """
    first = tf.nest.map_structure(_symbolic, element_spec)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(first)
    metrics, loss = model._compile_metrics, model._compile_loss
    with model.distribute_strategy.scope(), random_state_kept():
        is_metric_missing = metrics is not None and not metrics.built
        if not is_metric_missing and (loss is None or loss.built):
            return
        y_pred = backend.compute_output_spec(model, x, training=True)
        weighted = {"sample_weight": sample_weight}
        if is_metric_missing:
            backend.compute_output_spec(model.compute_metrics, x, y, y_pred, **weighted)
        if loss is not None and not loss.built:
            backend.compute_output_spec(
                model._compute_loss, x, y, y_pred, **weighted, training=True
            )


def when_built(model: keras.Model, then: Callable[[], bool]) -> bool:
    """Calls `then` whenever the first step has created some variables of metrics, before it uses
    them, until `then` returns True. A step may leave parts unbuilt: one that computes its own loss
    never builds the compiled one.

    Returns:
        True if there are parts that are not built yet.
    """
    waiting = [part for part in _compiled(model) if not part.built]

    def hook(part: Any) -> None:
        stock = type(part).build.__get__(part)

        def build(*args: Any, **kwargs: Any) -> None:
            vars(part).pop("build", None)
            stock(*args, **kwargs)
            with tf.init_scope():  # a step that is being traced runs later
                if then():
                    stop_waiting(model)

        _UPSTREAM.patch(part, "build", build)

    for part in waiting:
        hook(part)
    return bool(waiting)


def stop_waiting(model: keras.Model) -> None:
    """Undoes `when_built`."""
    for part in _compiled(model):
        vars(part).pop("build", None)


def reset_unbuilt(model: keras.Model) -> None:
    """Resets compiled metrics that no step has built yet. `reset_metrics` ignores these, although
    the user's metric objects may already have variables."""
    arguments, metrics = compile_arguments(model), model._compile_metrics
    if arguments is None or metrics is None or metrics.built:
        return
    for name in ("metrics", "weighted_metrics"):
        for each in keras.tree.flatten(arguments[name]):
            if isinstance(each, keras.metrics.Metric):
                each.reset_state()


def _compiled(model: keras.Model) -> list[Any]:
    return [part for part in (model._compile_loss, model._compile_metrics) if part is not None]


def _symbolic(spec: Any) -> keras.KerasTensor:
    one = getattr(spec, "_value_specs", (spec,))[0]  # the first replica's
    return keras.KerasTensor(one.shape, keras.backend.standardize_dtype(one.dtype))


def parts(variable: Any) -> list[Any]:
    """Returns the values of a Keras or TensorFlow variable on the replicas of this process, as
    references, without copying."""
    return [read_by_reference(part) for part in touched.parts(variable)]


def set_parts(variable: Any, values: Sequence[Any]) -> None:
    """Assigns one of `values` to every replica of this process."""
    for part, value in zip(touched.parts(variable), values, strict=True):
        part.assign(value)


def aggregation(variable: Any) -> str:
    """Returns Keras' name for the way in which the replicas' values are aggregated."""
    if isinstance(variable, keras.Variable):
        return str(variable.aggregation)
    return str(variable.aggregation.name).lower()
