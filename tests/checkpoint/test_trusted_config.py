"""Which entries of a model config are accepted, and which are refused before anything is built."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
from keras import layers  # noqa: E402

from keras_distplug.checkpoint.model_export import architecture_of  # noqa: E402
from keras_distplug.checkpoint.trusted_config import require_trusted  # noqa: E402
from keras_distplug.core.errors import ModelError  # noqa: E402


def config_of(*hidden: Any, **compiled: Any) -> dict[str, Any]:
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2)])
    model.compile(**{"optimizer": "adam", "loss": "mse", **compiled})
    told = architecture_of(model)
    assert told is not None
    return json.loads(json.dumps(told))


def test_models_of_keras() -> None:
    """Configs of Keras' own classes, functions and operations are accepted."""
    first = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation=keras.activations.gelu, kernel_regularizer="l2")(first)
    x = layers.BatchNormalization(dtype="float32")(keras.ops.relu(x) + 1.0)
    x = layers.Bidirectional(layers.LSTM(4))(layers.Reshape((6, 24))(x))
    x = layers.Dense(4, kernel_initializer=keras.initializers.Orthogonal(1), name="d")(x)
    x = keras.ops.concatenate([x, layers.Dense(4, kernel_constraint="max_norm")(x)])
    model = keras.Model(first, layers.Activation(keras.ops.sigmoid)(x))
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.mean_squared_error,
        metrics=["mae", keras.metrics.AUC(), keras.metrics.mean_absolute_error],
    )
    told = json.loads(json.dumps(architecture_of(model)))
    require_trusted(told, model.count_params())
    assert keras.saving.deserialize_keras_object(told).count_params() == model.count_params()


@keras.saving.register_keras_serializable("own")
class Scaled(layers.Layer):
    def call(self, x: Any) -> Any:
        return 2 * x


@keras.saving.register_keras_serializable("own")
def own_loss(y: Any, p: Any) -> Any:
    return keras.ops.mean(y - p)


class Imported(layers.Layer):
    def call(self, x: Any) -> Any:
        return x


def test_what_the_user_has() -> None:
    """Registered objects and classes of imported modules are accepted: nothing is raised."""
    require_trusted(config_of(Scaled(), loss=own_loss, metrics=[own_loss]), 100)
    require_trusted(config_of(Imported()), 100)


def function(module: str, name: str) -> dict[str, Any]:
    return {
        "module": module, "class_name": "function", "config": name, "registered_name": "function"
    }  # fmt: skip


def made(module: str | None, name: str, **config: Any) -> dict[str, Any]:
    return {"module": module, "class_name": name, "config": config, "registered_name": None}


FORGED = {
    "Lambda": made("keras.layers", "Lambda", function=function("builtins", "relu")),
    "Lambda of keras.src": made("keras.src.layers.core.lambda_layer", "Lambda"),
    "lambda": {"class_name": "__lambda__", "config": {"code": "4wEA"}},
    "TypeSpec": {"class_name": "__typespec__", "config": []},
    "TFSMLayer": made("keras.layers", "TFSMLayer", filepath="/tmp/model"),
    "torch": made("keras.layers", "TorchModuleWrapper"),
    "jax": made("keras.layers", "JaxLayer", call_fn="x"),
    **{
        f"{module}.{name} as {place}": made("keras.layers", "Activation", activation=each)
        for module, name in [
            ("keras.utils", "get_file"),
            ("builtins", "get_file"),
            ("builtins", "exec"),
            ("builtins", "print"),
            ("keras.saving", "load_model"),
            ("keras.config", "enable_unsafe_deserialization"),
            ("keras.visualization", "plot_image_gallery"),
            ("keras.ops", "cond"),
            ("keras.src.ops.core", "cond"),
            ("os", "system"),
            ("subprocess", "call"),
            ("tensorflow", "print"),
            ("numpy", "load"),
        ]
        for place, each in [("function", function(module, name)), ("class", made(module, name))]
        if (place, module) != ("class", "keras.src.ops.core")
    },
    "a class of another module": made("subprocess", "Popen", args=["true"]),
    "a class that is no layer": made("pathlib", "Path"),
    "a module that is not imported": made("antigravity", "Layer"),
    "dots in a name": made("keras", "utils.get_file", origin="file:///etc/passwd"),
    "dots in a class": made("keras.layers", "..utils.get_file"),
    "keras.utils": made("keras.utils", "FeatureSpace"),
    "no module": made(None, "get_file"),
    "numbers for names": {"module": 1, "class_name": 2, "config": {}},
    "a list for a name": {"module": "keras.layers", "class_name": ["Dense"], "config": {}},
    "a vocabulary in a file": made("keras.layers", "StringLookup", vocabulary="/etc/passwd"),
    "many units": made("keras.layers", "Dense", units=100_000_000),
    "a large embedding": made("keras.layers", "Embedding", input_dim=10**12, output_dim=1),
    "many filters": made("keras.layers", "Conv2D", filters=10**9, kernel_size=3),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("place", ["layer", "loss", "inside"])
def test_forged(name: str, place: str) -> None:
    """Refused by us, and with the place: as a layer, as the loss, and in another layer."""
    told = config_of(layers.Dense(3))
    if place == "layer":
        told["config"]["layers"][1] = FORGED[name]
        where = "model/config/layers/1"
    elif place == "loss":
        told["compile_config"]["loss"] = FORGED[name]
        where = "model/compile_config/loss"
    else:
        told["config"]["layers"][1]["config"]["kernel_initializer"] = {
            "class_name": "__tuple__", "config": [FORGED[name]]
        }  # fmt: skip
        where = "model/config/layers/1/config/kernel_initializer/config/0"
    with pytest.raises(ModelError, match=where):
        require_trusted(told, elements=100)


def test_deep() -> None:
    config: Any = 1
    for _ in range(10_000):
        config = [config]
    with pytest.raises(ModelError, match="nested more than 100 deep"):
        require_trusted(config, elements=1)
