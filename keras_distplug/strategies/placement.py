"""Places a model inside the scope of a strategy.

A model created outside that scope is read (`Blueprint.of`) and rebuilt inside it (`rebuild`), and
the trained state is written back into it (`write_back`). It is read first because TensorFlow may
need a restart before the scope exists.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.parameter_server import embeddings
from keras_distplug.backend.tensorflow.runtime import models, workers
from keras_distplug.backend.tensorflow.runtime.embedding_tables import Table, merge_parts
from keras_distplug.core.errors import ConfigurationError, ModelError
from keras_distplug.strategies.recompile import Recompile, make_recompile

Origin: TypeAlias = "keras.Model | Blueprint | Callable[[], keras.Model]"

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization)
_WEIGHTS = ""  # a key that no optimizer's name can equal


@dataclass(frozen=True)
class Placement:
    """A model and the strategy it is trained under.

    Args:
        strategy: The strategy.
        model: The model to be trained, inside the scope of `strategy`.
        origin: The source of `model`: the model itself, the blueprint of the caller's model, or the
            caller's function.
    """

    strategy: tf.distribute.Strategy
    model: keras.Model
    origin: Origin

    def write_back(self) -> None:
        """Writes the trained state into the caller's model, if that is a different object."""
        if isinstance(self.origin, Blueprint):
            self.origin.write_back(self.model)


def place(
    origin: Origin,
    strategy: tf.distribute.Strategy,
    own_arguments: Mapping[str, Any],
    min_shard_bytes: int | None,
) -> Placement:
    """Creates the model inside the scope of `strategy`, unless `origin` can be trained as it is.

    For `own_arguments` see `require_usable`, for `min_shard_bytes` see `embeddings.split`.

    Raises:
        ModelError: If the model cannot be created or trained.
        ConfigurationError: If it cannot be trained with these arguments.
    """
    if isinstance(origin, keras.Model):
        embeddings.require_split(origin, min_shard_bytes)
        return Placement(strategy, origin, origin)
    with embeddings.split(min_shard_bytes), strategy.scope():
        model = origin.rebuild(strategy) if isinstance(origin, Blueprint) else origin()
    require_usable(model, "returned by the function passed as `model`", own_arguments)
    return Placement(strategy, model, origin)


def require_usable(model: Any, where: str, own_arguments: Mapping[str, Any]) -> None:
    """Raises an error if the model cannot be trained, or cannot be trained with these arguments.

    Args:
        model: The object to check, which should be a compiled model.
        where: The origin of the object, for messages.
        own_arguments: Arguments that neither `distributed_fit` nor Keras' `fit` accepts.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            "distributed_fit expects a compiled keras.Model, or a function that builds and "
            f"compiles one. Received: an object of type {type(model).__name__}, {where}."
        )
    if not model.compiled:
        raise ModelError(
            f"The model {model.name!r} ({where}) is not compiled. Call "
            "`model.compile(optimizer=..., loss=...)` before distributed_fit or, if a function "
            "builds the model, in that function."
        )
    if own_arguments and not models.has_own_fit(model):
        raise ConfigurationError(
            "Expected arguments of `distributed_fit`, which accepts those of `Model.fit` and a few "
            f"more. Received: {', '.join(sorted(own_arguments))}. Other arguments are only passed "
            f"to a class that overrides `fit`; {type(model).__name__} does not."
        )


@dataclass(frozen=True)
class Blueprint:
    """The description and state of a compiled model, readable without TensorFlow's runtime.

    Args:
        model: The caller's model.
        recompile: A function that compiles another model like the caller's.
        assets: For every layer of `list_layers`, its asset files, such as the vocabulary of a
            tokenizer: their contents by relative path.
        values: The arrays of `_get_state`, as far as the model is built.
        optimizer_targets: The variables that the optimizers train; see `models.optimizer_targets`.
        is_revived: True if TensorFlow is restarted before `rebuild`. This destroys the variables
            of the caller's model, and `write_back` replaces them.
    """

    model: keras.Model
    recompile: Recompile
    assets: Sequence[Mapping[str, bytes]]
    values: Mapping[str, Sequence[np.ndarray]]
    optimizer_targets: Mapping[str, Sequence[models.Target]]
    is_revived: bool

    @classmethod
    def of(cls, model: keras.Model, *, is_revived: bool) -> Blueprint:
        """Reads everything that `rebuild` needs.

        Raises:
            ModelError: If a model of this kind cannot be rebuilt.
        """
        if not models.is_clonable(model):
            _require_config(model)
        layers, targets = models.list_layers(model), models.optimizer_targets(model)
        for layer in layers:
            if isinstance(layer, _LOOKUPS):
                raise ModelError(
                    f"The model {model.name!r} holds the lookup table of layer {layer.name!r} "
                    f"({type(layer).__name__}), which cannot be moved into a strategy's scope. "
                    "Pass a function that builds and compiles the model, "
                    "`distributed_fit(build, ...)`, or do the lookup in the input pipeline."
                )
        return cls(
            model=model,
            recompile=make_recompile(model),
            assets=[_assets(layer) for layer in layers],
            values={
                owner: [np.asarray(each.numpy()) for each in variables]
                for owner, variables in _get_state(model).items()
                if variables and owner in (_WEIGHTS, *targets)
            },
            optimizer_targets=targets,
            is_revived=is_revived,
        )

    def rebuild(self, strategy: tf.distribute.Strategy) -> keras.Model:
        """Returns a copy of the caller's model and its state. Call it in the scope of `strategy`.

        Raises:
            ModelError: If the result differs from the caller's model.
        """
        model = self._rebuilt()
        _load_assets(models.list_layers(model), self.assets)
        _freeze_like(model, self.model)
        self.recompile(model)
        if _WEIGHTS in self.values:
            if not model.built:
                _build_like(model, self.model)
            self._require_same(_get_state(model)[_WEIGHTS])
            _freeze_like(model, self.model)  # the newly built variables
        models.build_optimizers(model, self.optimizer_targets)
        broadcast = _broadcast_from_chief if workers.is_multi_worker(strategy) else np.asarray
        made = _get_state(model)
        for owner, values in self.values.items():
            for variable, value in zip(made[owner], values, strict=True):
                variable.assign(broadcast(value))
        models.refresh(model)
        return model

    def write_back(self, trained: keras.Model) -> None:
        """Writes the state of `trained`, a result of `rebuild`, into the caller's model."""
        caller = self.model
        if self.is_revived:
            for variable in models.all_variables(caller):  # their values are assigned below
                models.revive(variable, np.zeros(variable.shape, variable.dtype))
            models.drop_functions(caller)
        theirs = _get_state(trained)
        if len(_get_state(caller)[_WEIGHTS]) < len(theirs[_WEIGHTS]):
            _build_like(caller, trained)
        models.build_optimizers(caller, models.optimizer_targets(trained))
        mine = _get_state(caller)
        for owner, variables in theirs.items():
            for variable, like in zip(mine[owner], variables, strict=True):
                variable.assign(np.asarray(like.numpy()))
        models.refresh(caller)
        caller.history = getattr(trained, "history", None)
        caller.stop_training = trained.stop_training

    def _rebuilt(self) -> keras.Model:
        caller = self.model
        classes = {type(layer).__name__: type(layer) for layer in models.list_layers(caller)}
        try:
            # Keras would inspect the optimizer, whose variables may no longer be alive.
            with keras.saving.custom_object_scope(classes), models.hide_compilation(caller):
                if models.is_clonable(caller):
                    return keras.models.clone_model(caller)
                return type(caller).from_config(caller.get_config())
        except Exception as error:
            raise ModelError(
                f"The model {caller.name!r} of class {type(caller).__name__} could not be rebuilt "
                f"inside the strategy's scope: {error}. Check `get_config` and `from_config` "
                "of its class and its layers, or pass a function that builds and compiles the "
                "model: `distributed_fit(build, ...)`."
            ) from error

    def _require_same(self, variables: Sequence[keras.Variable | Table]) -> None:
        made = [(v.path, tuple(v.shape)) for v in variables]
        originals = zip(_get_state(self.model)[_WEIGHTS], self.values[_WEIGHTS], strict=True)
        expected = [(v.path, value.shape) for v, value in originals]
        if [shape for _, shape in made] != [shape for _, shape in expected]:
            difference = next(
                (pair for pair in zip(expected, made, strict=False) if pair[0][1] != pair[1][1]),
                (f"{len(expected)} variables", f"{len(made)} variables"),
            )
            raise ModelError(
                f"The model {self.model.name!r}, rebuilt inside the strategy's scope, differs from "
                "the original in the shapes or the number of its variables: expected "
                f"{difference[0]}, received {difference[1]}. The `get_config` of the model or "
                "of one of its layers omits a setting that affects the variables. Add that "
                "setting, or pass a function that builds and compiles the model: "
                "`distributed_fit(build, ...)`."
            )


def _broadcast_from_chief(value: np.ndarray) -> tf.Tensor:
    """Returns the chief's `value` on every worker. Call it inside the strategy's scope.

    TensorFlow broadcasts the initial value of a mirrored variable from the chief, but not later
    assignments.
    """
    value = np.asarray(value)
    # The collective supports few dtypes; these can represent all values of the others.
    wide = {"f": np.float32, "V": np.float32, "u": np.int64, "i": np.int64}.get(value.dtype.kind)
    carrier = value if value.dtype in (np.float64, bool) or wide is None else value.astype(wide)
    return tf.cast(tf.Variable(carrier, trainable=False).read_value(), value.dtype)


def _get_state(model: keras.Model) -> dict[str, list[keras.Variable | Table]]:
    """Returns the weights and seed generators of `model`, and every optimizer's variables under
    its name. Sharded embedding tables count as one variable."""
    metrics = {id(variable) for variable in model.metrics_variables}
    return {
        _WEIGHTS: merge_parts(each for each in model.variables if id(each) not in metrics),
        **{
            name: merge_parts(each.variables)
            for name, each in models.list_optimizers(model).items()
        },
    }


def _require_config(model: keras.Model) -> None:
    try:
        model.get_config()
    except NotImplementedError as error:
        raise ModelError(
            f"The model {model.name!r} of class {type(model).__name__} was created outside the "
            "strategy's scope and cannot be rebuilt inside it: the class, or that of one of its "
            "layers, needs its own `get_config` method. Add it, or pass a function that builds and "
            "compiles the model: `distributed_fit(build, ...)`."
        ) from error


def _assets(layer: keras.Layer) -> dict[str, bytes]:
    """Returns the asset files that Keras would store in a `.keras` file for this layer."""
    if not hasattr(layer, "save_assets"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(folder)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _load_assets(layers: Sequence[keras.Layer], assets: Sequence[Mapping[str, bytes]]) -> None:
    for layer, files in zip(layers, assets, strict=False):
        if not files or not hasattr(layer, "load_assets"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            layer.load_assets(folder)


def _freeze_like(model: keras.Model, caller: keras.Model) -> None:
    """Copies `trainable` from the caller's model, since a configuration does not always record
    which layers were frozen after they were created."""
    mine, theirs = ([each, *models.list_layers(each)] for each in (model, caller))
    if [type(layer) for layer in mine] != [type(layer) for layer in theirs]:
        return  # only if the models are not built; built ones are compared later
    for layer, like in zip(mine, theirs, strict=True):  # a layer precedes its sublayers
        if layer.trainable != like.trainable:
            layer.trainable = like.trainable
    for variable, like in zip(model.weights, caller.weights, strict=False):
        if variable.trainable != like.trainable:
            variable.trainable = like.trainable


def _build_like(model: keras.Model, like: keras.Model) -> None:
    config = like.get_build_config()
    try:
        if config:
            models.build_from_config(model, config)
    except Exception as error:
        raise ModelError(
            f"The model {like.name!r} of class {type(like).__name__} could not be built with the "
            f"build configuration {config}: {error}. Pass a function "
            "that builds and compiles the model: `distributed_fit(build, ...)`."
        ) from error
