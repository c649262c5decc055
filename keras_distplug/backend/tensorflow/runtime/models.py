"""Access to private parts of Keras models, optimizers and random state.

Keras 3.10 to 3.15.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional, functional_like_constructor
from keras.src.saving.serialization_lib import ObjectSharingScope

from keras_distplug.backend.tensorflow.runtime import private_names
from keras_distplug.backend.tensorflow.runtime.embedding_tables import get_parts, merge_parts
from keras_distplug.backend.tensorflow.runtime.frames import callers
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.core.errors import ModelError

_UPSTREAM = Upstream(keras="3.10 to 3.15")
_LIMITING = threading.Lock()  # one patch at a time
_GLOBAL_SEED_GENERATOR = "global_seed_generator"

Target = int | str  # a variable that an optimizer trains: a position in `model.weights`, or a name


def compile_arguments(model: keras.Model) -> Mapping[str, Any] | None:
    """Returns the original objects passed to `model.compile`; None if it was not called."""
    config = getattr(model, "_compile_config", None)
    return None if config is None else dict(config.config)


@contextmanager
def hide_compilation(model: keras.Model) -> Iterator[None]:
    """Hides from Keras that `model` is compiled."""
    compiled = model.compiled
    model.compiled = False
    try:
        yield
    finally:
        model.compiled = compiled


def is_clonable(model: keras.Model) -> bool:
    """True if `keras.models.clone_model` returns an equal model of the same class."""
    if isinstance(model, keras.Sequential):
        return type(model) is keras.Sequential
    return isinstance(model, Functional) and bool(functional_like_constructor(type(model)))


def serialize(model: keras.Model) -> dict[str, Any]:
    """Returns the configuration that a `.keras` file would contain for `model`."""
    with ObjectSharingScope():
        told: dict[str, Any] = keras.saving.serialize_keras_object(model)
    return told


def deserialize(config: Mapping[str, Any]) -> keras.Model:
    """Returns the model from a result of `serialize`. Lambdas are refused."""
    with ObjectSharingScope():
        return keras.saving.deserialize_keras_object(dict(config), safe_mode=True)


@contextmanager
def variables_limited(most: int) -> Iterator[None]:
    """Raises a `ModelError` before memory is allocated for too many variable values.

    The sizes of weights depend on those of the inputs, so a configuration does not show all sizes.

    Args:
        most: The maximum total number of values in variables created within the `with` block.
    """
    total, own_thread = 0, threading.get_ident()

    def require_room(variable: keras.Variable, shape: Any) -> Any:
        nonlocal total
        shape = validate(variable, shape)
        if threading.get_ident() != own_thread:
            return shape
        total += math.prod(shape)
        if total > most:
            raise ModelError(
                f"Variable {variable.path} of shape {list(shape)} does not belong to the "
                "checkpoint: with it, the model would have more values than the checkpoint holds."
            )
        return shape

    with _LIMITING:
        validate = keras.Variable._validate_shape
        with _UPSTREAM.patched(keras.Variable, "_validate_shape", require_room):
            yield


def list_seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Returns the seed generators of `model` and its layers."""
    return [each for owner in (model, *list_layers(model)) for each in owner._seed_generators]


def list_seeds(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of the seed generators of `model` and its layers, and of Keras' global
    seed generator."""
    generators = list_seed_generators(model)
    if (of_all := global_seed_generator()) is not None:
        generators.append(of_all)
    return [generator.state for generator in generators]


def list_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns all layers of `model`, at any depth."""
    return list(model._flatten_layers(include_self=False))


def layers_by_place(model: keras.Model) -> dict[str, keras.Layer]:
    """Returns all layers of `model` by their place in the hierarchy, such as `0.1`."""
    return {place: layer for place, layer, _ in _places(model, "", ())}


def is_placed(model: keras.Model) -> bool:
    """True if `model` was created inside the scope of a strategy."""
    return model._distribute_strategy is not None


def has_own_fit(model: keras.Model) -> bool:
    """True if the model overrides Keras' `fit`."""
    return type(model).fit is not keras.Model.fit or "fit" in vars(model)


def has_own_step(model: keras.Model) -> bool:
    """True if the model's class overrides Keras' `train_step`."""
    return type(model).train_step is not private_names.Trainer.train_step


def runs_eagerly(model: keras.Model) -> bool:
    """True if the steps of `model` run eagerly, without being traced."""
    return bool(model.run_eagerly or tf.config.functions_run_eagerly())


def is_in_fit(model: keras.Model) -> bool:
    """True if the caller is called, directly or indirectly, by Keras' `fit` of `model`."""
    return any(
        frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model
        for frame in callers(sys._getframe(1))
    )


def is_traced_twice(model: keras.Model) -> bool:
    """True if Keras creates variables in the first step of `model`, but could create them earlier.

    `tf.function` traces a function a second time if it has created variables. Under a strategy,
    Keras creates all variables before the first step; otherwise, in that step. If the model is not
    built or overrides `train_step`, the required variables are not known in advance.
    """
    return (
        model._distribute_strategy is None
        and not runs_eagerly(model)
        and not has_own_step(model)
        and model.built
        and all(layer.built for layer in list_layers(model))
    )


def build_from_config(model: keras.Model, config: Mapping[str, Any]) -> None:
    """Builds `model` from a result of `get_build_config`, with the same variable names as a first
    call would give."""
    with model.distribute_strategy.scope(), model._open_name_scope():
        model.build_from_config(dict(config))


def unbuilt_layers(model: keras.Model) -> frozenset[str]:
    """Returns the places of all layers that are not built; "" stands for the model."""
    unbuilt = {place for place, layer, _ in _places(model, "", ()) if not layer.built}
    return frozenset(unbuilt if model.built else {"", *unbuilt})


def build_configs(
    model: keras.Model, places: Collection[str]
) -> dict[str, tuple[int, dict[str, Any]]]:
    """Returns the build configurations of layers that were built since training started.

    Args:
        model: The model in training.
        places: The earlier result of `unbuilt_layers`. Sublayers created by these layers count,
            too.

    Returns:
        By place, the number of its owners' name scopes in which a layer was built (a `train_step`
        may call it outside the model's scope), and its `get_build_config()`.
    """
    return {
        place: (_scopes_around(layer, len(owners)), config)
        for place, layer, owners in _places(model, "", ())
        if layer.built
        and any(not each or f"{place}.".startswith(f"{each}.") for each in places)
        and (config := layer.get_build_config())
    }


def _scopes_around(layer: keras.Layer, owners: int) -> int:
    return owners if layer.path is None else min(layer.path.count("/"), owners)


def build_layers(model: keras.Model, configs: Mapping[str, tuple[int, Mapping[str, Any]]]) -> None:
    """Builds the unbuilt layers from a result of `build_configs`, with the same variable names. A
    layer may be built although its sublayers are not."""
    for place, layer, owners in _places(model, "", ()):
        if not layer.built and place in configs:
            scopes, config = configs[place]
            with ExitStack() as stack:
                stack.enter_context(model.distribute_strategy.scope())
                for owner in owners[len(owners) - scopes :]:
                    stack.enter_context(owner._open_name_scope())
                layer.build_from_config(dict(config))


def _places(
    owner: keras.Layer, place: str, owners: tuple[keras.Layer, ...]
) -> Iterator[tuple[str, keras.Layer, tuple[keras.Layer, ...]]]:
    """Yields the layers of `owner`, with their places and owners. A layer precedes its sublayers,
    which it may create when it is built."""
    owners = (*owners, owner)
    for number, layer in enumerate(owner._layers):
        if all(layer is not each for each in owners):
            here = f"{place}.{number}" if place else str(number)
            yield here, layer, owners
            yield from _places(layer, here, owners)


def list_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Returns the optimizer that `model` was compiled with, and those stored as attributes."""
    found = {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer)
    }
    compiled = getattr(model, "optimizer", None)
    others = {name: each for name, each in found.items() if each is not compiled}
    return others if compiled is None else {"optimizer": compiled, **others}


def learning_rate(model: keras.Model) -> float | None:
    """Returns the learning rate if it is stored in a variable, otherwise None."""
    value = getattr(getattr(model, "optimizer", None), "learning_rate", None)
    return float(value.numpy()) if isinstance(value, keras.Variable) else None


def set_learning_rate(model: keras.Model, value: float | None) -> None:
    if value is not None:
        model.optimizer.learning_rate = value


def optimizer_targets(
    model: keras.Model, others: Mapping[str, keras.Variable] = MappingProxyType({})
) -> dict[str, list[Target]]:
    """Returns the variables that every built optimizer trains.

    Args:
        model: The model that has the optimizers.
        others: Variables outside the model, by name.

    Returns:
        By name of the optimizer, the positions of the variables in `model.weights`, where a split
        table counts as one; for variables of `others`, their names.
    """
    places: dict[int, Target] = {id(variable): name for name, variable in others.items()}
    places |= {
        id(part): place
        for place, weight in enumerate(merge_parts(model.weights))
        for part in get_parts(weight)
    }
    return {
        name: list(
            dict.fromkeys(
                places[id(v)]
                for v in get_inner_optimizer(optimizer)._trainable_variables
                if id(v) in places
            )
        )
        for name, optimizer in list_optimizers(model).items()
        if optimizer.built
    }


def build_optimizers(
    model: keras.Model,
    targets: Mapping[str, Sequence[Target]],
    find: Callable[[str], keras.Variable | None] = lambda name: None,
) -> None:
    """Builds the optimizers of `targets` that are not built yet, as a first step would.

    Args:
        model: The model that has the optimizers.
        targets: A result of `optimizer_targets`.
        find: A function that returns a variable outside the model by name; None if it does not
            exist.
    """
    weights = [get_parts(weight) for weight in merge_parts(model.weights)]

    def trained(places: Sequence[Target]) -> list[keras.Variable]:
        found: list[keras.Variable] = []
        for place in places:
            if isinstance(place, int):
                found += weights[place]
            elif (variable := find(place)) is not None:
                found.append(variable)
        return found

    def build() -> None:
        for name, optimizer in list_optimizers(model).items():
            if name in targets and not optimizer.built:
                # The variables of a LossScaleOptimizer's inner optimizer have the outer one's name.
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(trained(targets[name]))

    if is_placed(model) or runs_eagerly(model) or _is_on_default_device(model):
        with model.distribute_strategy.scope():
            build()
    else:
        # Outside a trace, slots would be placed on the devices of their variables.
        tf.function(build, autograph=False).get_concrete_function()


def _is_on_default_device(model: keras.Model) -> bool:
    """True if all weights are on the device where variables are created by default."""
    devices = {
        part.value.device for weight in merge_parts(model.weights) for part in get_parts(weight)
    }
    return devices == {tf.zeros(()).device}


def get_inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the inner optimizer of a `LossScaleOptimizer`, or any other optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def refresh(model: keras.Model) -> None:
    """Recomputes the values that layers derive from their variables, after an assignment."""
    for layer in list_layers(model):
        if isinstance(layer, keras.layers.Normalization) and layer.built:
            layer.finalize_state()


def list_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics that `model` was compiled with, and its other metrics."""
    arguments = keras.tree.flatten(list((compile_arguments(model) or {}).values()))
    compiled = [each for each in arguments if isinstance(each, keras.metrics.Metric)]
    return list({id(each): each for each in (*compiled, *model.metrics)}.values())


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns every variable of `model`, its optimizers, loss tracker and metrics, without
    duplicates."""
    holders = [model, *list_optimizers(model).values(), model._loss_tracker, *list_metrics(model)]
    return list({id(v): v for holder in holders for v in holder.variables}.values())


def revive(variable: keras.Variable, value: np.ndarray) -> None:
    """Gives `variable` a new TensorFlow variable to replace one whose context was reset."""
    variable._initialize(tf.convert_to_tensor(value))


def drop_functions(model: keras.Model) -> None:
    """Makes Keras trace its step functions again."""
    for name in ("train_function", "test_function", "predict_function"):
        setattr(model, name, None)


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator for `keras.random` calls without a seed; None until it is created."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def restore_global_seed_generator(state: np.ndarray) -> None:
    generator = global_seed_generator()
    if generator is None:
        generator = keras.random.SeedGenerator(0)
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)
    revive(generator.state, state)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores the random state of `keras.random` and Python after the `with` block.

    Layers and initializers without a seed draw one from Python's generator. Keras 3.10 also creates
    or uses the global seed generator when a model is built.
    """
    drawn, generator = random.getstate(), global_seed_generator()
    state = np.array([] if generator is None else generator.state.value)
    try:
        yield
    finally:
        random.setstate(drawn)
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)
        if generator is not None and not np.array_equal(generator.state.value, state):
            generator.state.assign(state)


def start_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes the `fit` that is about to loop start at `epoch`. None undoes this; Keras would keep
    the value for the next `fit`."""
    model._initial_epoch = epoch
