"""Tests which entries of a model config are accepted, and which are refused before any object is
built."""

from __future__ import annotations

import copy
import inspect
import json
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
from checkpoint import honest_models  # noqa: E402
from checkpoint.forged_configs import (  # noqa: E402
    ELEMENTS,
    FORGED,
    FORGED_NAMES,
    function,
    layer,
    made,
)
from keras import layers  # noqa: E402
from keras.src import api_export  # noqa: E402

from keras_distplug.backend.tensorflow.runtime import keras_files, models  # noqa: E402
from keras_distplug.backend.tensorflow.runtime.keras_files import KerasFiles, Kind  # noqa: E402
from keras_distplug.checkpoint import trusted_config  # noqa: E402
from keras_distplug.checkpoint.imported_names import ImportedNames  # noqa: E402
from keras_distplug.checkpoint.model_export import get_architecture  # noqa: E402
from keras_distplug.checkpoint.trusted_config import (  # noqa: E402
    PARTS,
    Names,
    NamesBeforeImports,
    require_trusted,
)
from keras_distplug.core.errors import ModelError  # noqa: E402

_FOUND = keras_files.find()
assert _FOUND is not None
FILES: KerasFiles = _FOUND
NAMES: dict[str, Names] = {
    "imported": ImportedNames(),
    "before imports": NamesBeforeImports(FILES, may_be_users=False),
    "before imports of the user's": NamesBeforeImports(FILES, may_be_users=True),
}


def config_of(*hidden: Any, **compiled: Any) -> dict[str, Any]:
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2)])
    model.compile(**{"optimizer": "adam", "loss": "mse", **compiled})
    return description_of(model)


def description_of(model: keras.Model) -> dict[str, Any]:
    config = get_architecture(model)
    assert config is not None
    return json.loads(json.dumps(config))


# Accepted entries


def elements_in(model: keras.Model) -> int:
    return model.count_params() + sum(
        v.value.shape.num_elements() for v in model.optimizer.variables
    )


@pytest.mark.parametrize("name", honest_models.MODELS)
def test_models_of_keras(name: str) -> None:
    """Configs of Keras' own classes, functions and operations are accepted."""
    model = honest_models.MODELS[name]()
    config = description_of(model)
    for names in NAMES.values():
        require_trusted(config, elements_in(model), names)
    rebuilt = keras.saving.deserialize_keras_object(config)
    assert rebuilt.count_params() == model.count_params()


def test_honest_models_cover_keras() -> None:
    """The models above contain most layers, losses, metrics and the like."""
    seen = json.dumps([description_of(make()) for make in honest_models.MODELS.values()])
    for part, least in honest_models.SHARES.items():
        public = sys.modules[f"keras.{part}"]
        wanted = [
            name
            for name, each in vars(public).items()
            if isinstance(each, type) and hasattr(each, "get_config")
            and api_export.get_name_from_symbol(each) == f"keras.{part}.{name}"
        ]  # fmt: skip
        found = [name for name in wanted if f'"class_name": "{name}"' in seen]
        missing = sorted({*wanted} - {*found})
        assert len(found) >= least * len(wanted), f"{part}: {missing}"


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


USERS: dict[str, Callable[[], dict[str, Any]]] = {
    "registered": lambda: config_of(Scaled(), loss=own_loss, metrics=[own_loss]),
    "imported": lambda: config_of(Imported()),
}


@pytest.mark.parametrize("kind", USERS)
def test_objects_of_the_user(kind: str) -> None:
    """Registered objects and classes of imported modules are accepted, and before the imports left
    to the check after them; they are refused if nothing is imported."""
    config = USERS[kind]()
    require_trusted(config, ELEMENTS, NAMES["imported"])
    require_trusted(config, ELEMENTS, NAMES["before imports of the user's"])
    with pytest.raises(ModelError, match=r"class '(Scaled|Imported)' of module "):
        require_trusted(config, ELEMENTS, NAMES["before imports"])


# Refused entries


def forged_in(place: str, entry: Any, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns a config with an entry, and the entry's path."""
    config = copy.deepcopy(config)
    if place == "layer":
        config["config"]["layers"][1] = entry
        return config, "model/config/layers/1"
    if place == "loss":
        config["compile_config"]["loss"] = entry
        return config, "model/compile_config/loss"
    config["config"]["layers"][1]["config"]["kernel_initializer"] = {
        "class_name": "__tuple__", "config": [entry]
    }  # fmt: skip
    return config, "model/config/layers/1/config/kernel_initializer/config/0"


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return config_of(layers.Dense(3))


@pytest.mark.parametrize("name", [*FORGED, *FORGED_NAMES])
def test_forged(name: str, config: dict[str, Any]) -> None:
    """Entries are refused with the same message before and after imports, with their path: as a
    layer, as the loss, and in another layer. If an entry cannot be the user's, it is refused
    whatever will be imported."""
    entry = FORGED[name] if name in FORGED else FORGED_NAMES[name]
    for place in ("layer", "loss", "inside"):
        changed, where = forged_in(place, entry, config)
        said = set()
        for kind, names in NAMES.items():
            if kind == "before imports of the user's" and name not in FORGED:
                continue
            with pytest.raises(ModelError) as caught:
                require_trusted(changed, ELEMENTS, names)
            said.add(str(caught.value))
        assert len(said) == 1
        words = said.pop()
        assert where in words or "nested more than 100 levels deep" in words
        assert len(words) < 1000


def test_number_of_kinds() -> None:
    distinct = [entry for entry in FORGED.values() if list(FORGED.values()).count(entry) == 1]
    assert len(distinct) >= 60


def test_registered_name_of_a_foreign_function(config: dict[str, Any]) -> None:
    """Keras looks up a function by its name only, so a registered name does not make it the
    user's."""
    hidden = function("builtins", "exec", "own>Scaled")
    changed, where = forged_in("loss", hidden, config)
    with pytest.raises(ModelError, match=f"{where} .*function 'exec' of module 'builtins'"):
        require_trusted(changed, ELEMENTS, NAMES["imported"])


def test_unrelated_class_of_an_imported_module(config: dict[str, Any]) -> None:
    """An imported module's class is only accepted if it is a layer, a loss or the like."""
    changed, where = forged_in("layer", made(__name__, "KerasFiles"), config)
    with pytest.raises(ModelError, match=where):
        require_trusted(changed, ELEMENTS, NAMES["imported"])


def test_outputs_with_the_names_of_arguments() -> None:
    """Only the arguments of Keras' classes have limits: an output's name raises no error."""
    config = {"compile_config": {"loss_weights": {"units": 1e6, "filters": -1.0}}}
    require_trusted(config, 10, ImportedNames())


def test_limit_of_variables() -> None:
    """Too many values are refused, in this thread and until the end only."""
    made: list[Any] = []

    def make(values: int) -> None:
        made.append(keras.Variable(np.zeros(values, "float32")))

    with models.variables_limited(100):
        make(60)
        other = threading.Thread(target=make, args=(1000,))
        other.start()
        other.join(60)
        with pytest.raises(ModelError, match=r"of shape \[50\] does not belong"):
            make(50)
    make(1000)
    assert [each.shape for each in made] == [(60,), (1000,), (1000,)]


def test_message(config: dict[str, Any]) -> None:
    """Control characters of an entry's path are escaped."""
    config = {**config, "\x1b[2J": layer("Lambda")}
    with pytest.raises(ModelError, match=r"model/\\x1b\[2J of"):
        require_trusted(config, ELEMENTS, NAMES["imported"])


def test_deep() -> None:
    config: Any = 1
    for _ in range(10_000):
        config = [config]
    with pytest.raises(ModelError, match="nested more than 100 levels deep"):
        require_trusted(config, 1, NAMES["imported"])


# Names in the files of Keras


def _get_kind(found: Any) -> Kind | None:
    if isinstance(found, type):
        return "class"
    return "function" if inspect.isfunction(found) else None


def _public_modules() -> list[ModuleType]:
    deeper = ("optimizers.schedules", "ops.numpy", "ops.nn", "ops.image", "ops.linalg")
    known = {f"keras.{part}" for part in (*PARTS, *deeper)}
    return [keras, *(module for name, module in sys.modules.items() if name in known)]


def _names_in(module: str) -> set[str]:
    """Returns all names that a file of Keras defines or imports."""
    file = keras_files._get_file(FILES.folder, module)
    assert file is not None
    return {*keras_files._definitions(file), *keras_files._imports(file)}


def test_public_names() -> None:
    """The files list every public name and its kind, like the imported Keras. Fails if a release of
    Keras has another layout."""
    compared = 0
    for module in _public_modules():
        names = {*dir(module), *_names_in(module.__name__)}
        for name in names:
            expected = _get_kind(getattr(module, name, None))
            assert FILES.kind(module.__name__, name) == expected, (module.__name__, name)
            assert ImportedNames().kind(module.__name__, name) == expected
            compared += expected is not None
    assert compared > 1000


def test_private_names() -> None:
    """The files of `keras.src` have the classes and functions that they define, and no others."""
    compared = 0
    for module, loaded in list(sys.modules.items()):
        if not module.startswith(tuple(f"keras.src.{part}." for part in PARTS)):
            continue
        for name in {*dir(loaded), *_names_in(module)}:
            found = getattr(loaded, name, None)
            is_defined = getattr(found, "__module__", None) == module
            expected = _get_kind(found) if is_defined else None
            assert FILES.kind(module, name) == expected, (module, name)
            assert ImportedNames().kind(module, name) == expected
            compared += expected is not None
    assert compared > 1000


def test_names_in_configs() -> None:
    """Every class of Keras is accepted under the name in its serialization, except those that are
    in no model."""
    refused = set()
    for module, loaded in list(sys.modules.items()):
        if not module.startswith(tuple(f"keras.src.{part}." for part in PARTS)):
            continue
        for name, found in list(vars(loaded).items()):
            if getattr(found, "__module__", None) != module or not hasattr(found, "get_config"):
                continue
            public = api_export.get_name_from_symbol(found) or f"{module}.{name}"
            entry = made(*public.rsplit(".", 1))
            try:
                require_trusted(entry, ELEMENTS, NAMES["before imports"])
            except ModelError:
                refused.add(name)
    never = {"Lambda", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"}
    assert refused <= never | {"Function", "Operation", "FeatureSpace"}


def test_unknown_layout(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Keras has another layout, or is not installed, nothing is refused before imports."""
    monkeypatch.setattr(keras_files, "_EXAMPLES", (("keras.layers", "NoSuchLayer", "class"),))
    assert keras_files.find() is None
    forged: Any = layer("Lambda")
    trusted_config.require_trusted_before_imports(forged, None, ())  # type: ignore[arg-type]
