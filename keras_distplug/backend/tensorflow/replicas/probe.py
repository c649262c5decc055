"""Runs a step of a model without changing variables, applying updates or involving other replicas.

Keras 3.10 to 3.15 have no hook around the calls of layers, which go through the attribute `call`.
Reading a metric's TensorFlow variable outside a replica is a collective of all workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.touched import Touched
from keras_distplug.backend.tensorflow.runtime.models import (
    all_variables,
    get_inner_optimizer,
    list_layers,
    list_optimizers,
)
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(keras="3.10 to 3.15")

OnCall = Callable[[keras.Layer, Any, Any], None]
OnGradients = Callable[[str, Sequence[Any], Sequence[keras.Variable]], None]


@contextmanager
def isolate_replica(model: keras.Model) -> Iterator[None]:
    """Discards assignments made inside, and reads variables without involving other replicas.

    For use in a single thread, outside the scope of a strategy.
    """
    own = [
        (variable, variable._value.values[0].read_value())
        for variable in all_variables(model)
        if _is_of_all_replicas(variable)
    ]
    eagerly = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with (
            Touched.of(model).restored(all_variables(model)),
            keras.StatelessScope(state_mapping=own, collect_losses=True),
        ):
            yield
    finally:
        tf.config.run_functions_eagerly(eagerly)


@contextmanager
def listening(
    model: keras.Model,
    on_call: OnCall,
    on_loss: Callable[[Any], None],
    on_gradients: OnGradients,
) -> Iterator[None]:
    """Reports the computations of a step of `model`, in order; optimizers apply nothing.

    Args:
        model: The model.
        on_call: Called after every layer's call, with the layer, its arguments and its result.
        on_loss: Called with the result of `compute_loss`.
        on_gradients: Called with the name of an optimizer, gradients, and their variables.
    """
    with ExitStack() as stack:

        def put(target: object, name: str, value: Any) -> None:
            stack.enter_context(_UPSTREAM.patched(target, name, value))

        for layer in list_layers(model):
            put(layer, "call", _reporting(layer.call, functools.partial(on_call, layer)))
        put(model, "compute_loss", _reporting(model.compute_loss, lambda _, loss: on_loss(loss)))
        for name, optimizer in list_optimizers(model).items():
            apply = functools.partial(_instead_of_apply, name, optimizer, on_gradients)
            put(optimizer, "apply", apply)
        yield


def _reporting(stock: Callable[..., Any], report: Callable[[Any, Any], None]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        given = stock(*args, **kwargs)
        report((args, kwargs), given)
        return given

    return reporting


def _instead_of_apply(
    name: str,
    optimizer: keras.optimizers.Optimizer,
    on_gradients: OnGradients,
    grads: Sequence[Any],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> None:
    if trainable_variables is None:
        trainable_variables = get_inner_optimizer(optimizer)._trainable_variables
    on_gradients(name, list(grads), list(trainable_variables))


def _is_of_all_replicas(variable: keras.Variable) -> bool:
    """True if reading the variable aggregates the values of all replicas."""
    value = variable._value
    return (
        isinstance(value, tf.distribute.DistributedValues)
        and value.synchronization == tf.VariableSynchronization.ON_READ
    )
