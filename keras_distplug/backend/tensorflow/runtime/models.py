"""Private corners of a Keras model, its optimizer and the random state.

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
from keras_distplug.backend.tensorflow.runtime.embedding_tables import parts_of, wholes
from keras_distplug.backend.tensorflow.runtime.frames import callers
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.core.errors import ModelError

_UPSTREAM = Upstream(keras="3.10 to 3.15")
_LIMITING = threading.Lock()  # one patch at a time
_GLOBAL_SEED_GENERATOR = "global_seed_generator"

Target = int | str  # what an optimizer trains: a position in `model.weights`, or a name


def compile_arguments(model: keras.Model) -> Mapping[str, Any] | None:
    """What `model.compile` was called with, as the objects themselves; None if it was not."""
    config = getattr(model, "_compile_config", None)
    return None if config is None else dict(config.config)


@contextmanager
def without_compilation(model: keras.Model) -> Iterator[None]:
    """Hides from Keras that `model` is compiled."""
    compiled = model.compiled
    model.compiled = False
    try:
        yield
    finally:
        model.compiled = compiled


def is_clonable(model: keras.Model) -> bool:
    """Can `keras.models.clone_model` make an equal model of the same class?"""
    if isinstance(model, keras.Sequential):
        return type(model) is keras.Sequential
    return isinstance(model, Functional) and bool(functional_like_constructor(type(model)))


def serialize(model: keras.Model) -> dict[str, Any]:
    """What a `.keras` file says of how `model` is made and compiled."""
    with ObjectSharingScope():
        told: dict[str, Any] = keras.saving.serialize_keras_object(model)
    return told


def deserialize(config: Mapping[str, Any]) -> keras.Model:
    """The inverse of `serialize`. No lambda is loaded."""
    with ObjectSharingScope():
        return keras.saving.deserialize_keras_object(dict(config), safe_mode=True)


@contextmanager
def variables_limited(most: int) -> Iterator[None]:
    """Raises a `ModelError` inside before memory is allocated for variables of more values.

    Sizes of weights follow from those of the inputs, so a config does not show all of them.

    Args:
        most: Total number of values in the variables made inside.
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
                f"Variable {variable.path} of shape {list(shape)} is too large: all arrays of the "
                "checkpoint contain fewer values."
            )
        return shape

    with _LIMITING:
        validate = keras.Variable._validate_shape
        with _UPSTREAM.patched(keras.Variable, "_validate_shape", require_room):
            yield


def seed_generators_of(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Those of `model` and its layers."""
    return [each for owner in (model, *layers_of(model)) for each in owner._seed_generators]


def seeds_of(model: keras.Model) -> list[keras.Variable]:
    """The states of the seed generators of `model` and its layers, and of that behind them."""
    generators = seed_generators_of(model)
    if (of_all := global_seed_generator()) is not None:
        generators.append(of_all)
    return [generator.state for generator in generators]


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """All layers of `model`, at any depth."""
    return list(model._flatten_layers(include_self=False))


def layers_by_place(model: keras.Model) -> dict[str, keras.Layer]:
    """The layers of `model`, at any depth, by where they are: `0.1`."""
    return {place: layer for place, layer, _ in _places(model, "", ())}


def is_placed(model: keras.Model) -> bool:
    """Was `model` made inside the scope of a strategy?"""
    return model._distribute_strategy is not None


def has_own_fit(model: keras.Model) -> bool:
    """Returns whether the model has a `fit` that is not Keras'."""
    return type(model).fit is not keras.Model.fit or "fit" in vars(model)


def has_own_step(model: keras.Model) -> bool:
    """Does the model's class have a `train_step` that is not Keras'?"""
    return type(model).train_step is not private_names.Trainer.train_step


def runs_eagerly(model: keras.Model) -> bool:
    """Are the steps of `model` not traced?"""
    return bool(model.run_eagerly or tf.config.functions_run_eagerly())


def is_in_fit(model: keras.Model) -> bool:
    """Is this called, in any depth, by Keras' `fit` of `model`?"""
    return any(
        frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model
        for frame in callers(sys._getframe(1))
    )


def is_traced_twice(model: keras.Model) -> bool:
    """Does Keras make variables in the first step of `model`, though it could make them before?

    `tf.function` traces once more what has made variables. Under a strategy Keras makes them all
    before the first step, elsewhere that is left to the step. What a model that is not built, or a
    `train_step` of its own, needs is not known before.
    """
    return (
        model._distribute_strategy is None
        and not runs_eagerly(model)
        and not has_own_step(model)
        and model.built
        and all(layer.built for layer in layers_of(model))
    )


def build_from_config(model: keras.Model, config: Mapping[str, Any]) -> None:
    """Builds `model` from what `get_build_config` gave, with the names that a first call gives."""
    with model.distribute_strategy.scope(), model._open_name_scope():
        model.build_from_config(dict(config))


def unbuilt_layers(model: keras.Model) -> frozenset[str]:
    """The places of the layers of `model`, at any depth, that are not built; "" is the model."""
    unbuilt = {place for place, layer, _ in _places(model, "", ()) if not layer.built}
    return frozenset(unbuilt if model.built else {"", *unbuilt})


def build_configs(
    model: keras.Model, places: Collection[str]
) -> dict[str, tuple[int, dict[str, Any]]]:
    """How those layers of `model` were built that were not at first, as far as they tell.

    Args:
        model: In training.
        places: What `unbuilt_layers` was at first. What those have made themselves counts, too.

    Returns:
        By place, in how many of its owners' name scopes a layer was built (a `train_step` may call
        it outside of the model's), and its `get_build_config()`.
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
    """Builds the layers that are not built as `build_configs` tells, with the names that they had
    there. A layer may be built although those within it are not."""
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
    """The layers of `owner`, with where they are and what they are in; a layer first, then those
    within it, which it may make when it is built."""
    owners = (*owners, owner)
    for number, layer in enumerate(owner._layers):
        if all(layer is not each for each in owners):
            here = f"{place}.{number}" if place else str(number)
            yield here, layer, owners
            yield from _places(layer, here, owners)


def optimizers_of(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizer that `model` was compiled with, and others that it has as attributes."""
    found = {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer)
    }
    compiled = getattr(model, "optimizer", None)
    others = {name: each for name, each in found.items() if each is not compiled}
    return others if compiled is None else {"optimizer": compiled, **others}


def learning_rate(model: keras.Model) -> float | None:
    """The one that is kept in a variable; None if there is none."""
    value = getattr(getattr(model, "optimizer", None), "learning_rate", None)
    return float(value.numpy()) if isinstance(value, keras.Variable) else None


def set_learning_rate(model: keras.Model, value: float | None) -> None:
    if value is not None:
        model.optimizer.learning_rate = value


def optimizer_targets(
    model: keras.Model, others: Mapping[str, keras.Variable] = MappingProxyType({})
) -> dict[str, list[Target]]:
    """For each optimizer that is built, what it trains.

    Args:
        model: Whose optimizers these are.
        others: Variables by name that are not the model's.

    Returns:
        By name of the optimizer, the positions in `model.weights`, of tables that are split as if
        they were not; the name of a variable of `others`.
    """
    places: dict[int, Target] = {id(variable): name for name, variable in others.items()}
    places |= {
        id(part): place
        for place, weight in enumerate(wholes(model.weights))
        for part in parts_of(weight)
    }
    return {
        name: list(
            dict.fromkeys(
                places[id(v)] for v in inner_of(optimizer)._trainable_variables if id(v) in places
            )
        )
        for name, optimizer in optimizers_of(model).items()
        if optimizer.built
    }


def build_optimizers(
    model: keras.Model,
    targets: Mapping[str, Sequence[Target]],
    find: Callable[[str], keras.Variable | None] = lambda name: None,
) -> None:
    """Builds those optimizers of `targets` that are not built, as a first step would.

    Args:
        model: Whose optimizers these are.
        targets: As from `optimizer_targets`.
        find: Returns a variable that is not the model's, by name; None if it does not exist here.
    """
    weights = [parts_of(weight) for weight in wholes(model.weights)]

    def trained(places: Sequence[Target]) -> list[keras.Variable]:
        found: list[keras.Variable] = []
        for place in places:
            if isinstance(place, int):
                found += weights[place]
            elif (variable := find(place)) is not None:
                found.append(variable)
        return found

    def build() -> None:
        for name, optimizer in optimizers_of(model).items():
            if name in targets and not optimizer.built:
                # A LossScaleOptimizer's inner one has the outer one in its variables' names.
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(trained(targets[name]))

    if is_placed(model) or runs_eagerly(model) or _is_on_default_device(model):
        with model.distribute_strategy.scope():
            build()
    else:
        # Outside of a trace, slots come to the devices of their variables.
        tf.function(build, autograph=False).get_concrete_function()


def _is_on_default_device(model: keras.Model) -> bool:
    """Whether all weights are where variables are made anyway, inside of a trace and outside."""
    devices = {part.value.device for weight in wholes(model.weights) for part in parts_of(weight)}
    return devices == {tf.zeros(()).device}


def inner_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """That which a `LossScaleOptimizer` has inside; another optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def refresh(model: keras.Model) -> None:
    """Computes anew what layers derive from their variables, after those were assigned."""
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.Normalization) and layer.built:
            layer.finalize_state()


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that `model` was compiled with, and its others."""
    arguments = keras.tree.flatten(list((compile_arguments(model) or {}).values()))
    compiled = [each for each in arguments if isinstance(each, keras.metrics.Metric)]
    return list({id(each): each for each in (*compiled, *model.metrics)}.values())


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Every variable that `model` and what it was compiled with hold, each once."""
    holders = [model, *optimizers_of(model).values(), model._loss_tracker, *metrics_of(model)]
    return list({id(v): v for holder in holders for v in holder.variables}.values())


def revive(variable: keras.Variable, value: np.ndarray) -> None:
    """Gives `variable` a new TensorFlow variable in place of one whose context is gone."""
    variable._initialize(tf.convert_to_tensor(value))


def drop_functions(model: keras.Model) -> None:
    """Makes Keras trace its step functions anew."""
    for name in ("train_function", "test_function", "predict_function"):
        setattr(model, name, None)


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """The generator behind `keras.random` calls without a seed; None until one was made."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def restore_global_seed_generator(state: np.ndarray) -> None:
    generator = global_seed_generator()
    if generator is None:
        generator = keras.random.SeedGenerator(0)
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)
    revive(generator.state, state)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards `keras.random` and Python draw the same as without what was done inside.

    Layers and initializers without a seed take one from Python. Keras 3.10 also makes or uses the
    global generator when a model is built.
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
    """Makes the `fit` that is about to loop begin at `epoch`. None undoes that: Keras keeps it for
    the next `fit` otherwise."""
    model._initial_epoch = epoch
