"""Variables of which each replica has a value of its own, such as those of metrics.

Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21. To read such a variable as a whole adds the replicas
up, which on several workers is a collective; the parts of this process are private.
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

_UPSTREAM = Upstream(keras="3.10 to 3.15", tensorflow="2.18 to 2.21")


def own_of_replicas(model: keras.Model) -> list[keras.Variable]:
    """The variables of `model` whose values may differ between replicas, in Keras' order."""
    metrics = {id(variable) for variable in model.metrics_variables}
    return [
        variable
        for variable in all_variables(model)
        if id(variable) in metrics or variable.synchronization == "on_read"
    ]


def build(model: keras.Model, element_spec: Any) -> None:
    """Makes the variables of metrics as the first step would.

    Keras' own `_symbolic_build` calls the model as if it were evaluated, and what that gives may be
    another structure.

    Args:
        model: A built model.
        element_spec: Of a batch of its data.
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


def when_built(model: keras.Model, then: Callable[[], None]) -> bool:
    """Calls `then` as soon as the first step has made the variables of metrics, before they count.
    A step that runs eagerly makes, and changes, some before others: `then` is called after every
    part.

    Returns:
        Whether there is anything left to be made.
    """
    waiting = [part for part in _compiled(model) if not part.built]

    def hook(part: Any) -> None:
        stock = type(part).build.__get__(part)

        def build(*args: Any, **kwargs: Any) -> None:
            vars(part).pop("build", None)
            stock(*args, **kwargs)
            waiting.remove(part)
            if not waiting or tf.executing_eagerly():
                with tf.init_scope():  # a step that is being traced runs afterwards
                    then()

        _UPSTREAM.patch(part, "build", build)

    for part in list(waiting):
        hook(part)
    return bool(waiting)


def stop_waiting(model: keras.Model) -> None:
    """Undoes `when_built`."""
    for part in _compiled(model):
        vars(part).pop("build", None)


def reset_unbuilt(model: keras.Model) -> None:
    """Resets compiled metrics that no step has built, which `reset_metrics` leaves as they are: the
    user's objects have variables before that."""
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
    one = getattr(spec, "_value_specs", (spec,))[0]  # of the first replica
    return keras.KerasTensor(one.shape, keras.backend.standardize_dtype(one.dtype))


def parts(variable: Any) -> list[Any]:
    """The values that the replicas of this process have of a variable of Keras or TensorFlow.
    References: nothing is copied."""
    return [part.read_value() for part in touched.parts(variable)]


def set_parts(variable: Any, values: Sequence[Any]) -> None:
    """Gives each replica of this process its value."""
    for part, value in zip(touched.parts(variable), values, strict=True):
        part.assign(value)


def aggregation(variable: Any) -> str:
    """How the values of the replicas become one, by Keras' name."""
    if isinstance(variable, keras.Variable):
        return str(variable.aggregation)
    return str(variable.aggregation.name).lower()
