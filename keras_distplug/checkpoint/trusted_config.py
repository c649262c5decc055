"""Checks that model configs name only Keras' own classes and classes the user has imported.

Other people may be able to write to the folder of a config. Keras' `safe_mode` refuses lambdas, but
neither all functions that a config can name nor paths, and not in every supported version.

This file does not import Keras, so that commands can refuse a config before they do.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from keras_distplug.backend.tensorflow.runtime import keras_files
from keras_distplug.backend.tensorflow.runtime.keras_files import KerasFiles, Kind
from keras_distplug.core.errors import ModelError
from keras_distplug.core.printable import printable
from keras_distplug.storage.manifest import Manifest

EXPORT_INSTEAD = (
    "To export without rebuilding the model, export to a .safetensors file or, in a single-worker "
    "script, call `export(path)` on its BackupAndRestore callback during or after `fit`."
)

PARTS = (
    *("activations", "applications", "constraints", "distillation", "dtype_policies"),
    *("initializers", "layers", "losses", "metrics", "models", "ops", "optimizers"),
    *("quantizers", "random", "regularizers"),
)
FUNCTIONS_IN = ("activations", "constraints", "initializers", "losses", "metrics", "regularizers")
# Directly in `keras`; other names there, such as `Function`, are in no config.
TOP_LEVEL = (
    *("DTypePolicy", "FloatDTypePolicy", "InputSpec", "Initializer", "Layer", "Loss", "Metric"),
    *("Model", "Optimizer", "Quantizer", "Regularizer", "Sequential"),
)
_IN_PARTS = re.compile(rf"keras(\.src)?\.({'|'.join(PARTS)})(\.\w+)*")
# These can run code from the config, or read files.
_NEVER = (
    *("Lambda", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"),
    *("__lambda__", "__typespec__"),
)
_NOT_IN_CONFIGS = ("Function", "Node", "SymbolicArguments", "deserialize", "get", "serialize")
_ARRAYS = ("__tensor__", "__numpy__")
_PLAIN = (
    *("__bytes__", "__complex__", "__ellipsis__", "__keras_tensor__", "__set__", "__slice__"),
    "__tuple__",
)
_DTYPE = re.compile(r"bool|string|object|(u?int|b?float|complex)\d{1,3}(_e\dm\d[a-z0-9]{0,9})?")
_PATHS = ("vocabulary", "filepath")
# Arguments of Keras' classes that determine sizes of weights.
_SIZES = (
    *("units", "filters", "input_dim", "output_dim", "key_dim", "value_dim", "num_heads"),
    *("depth_multiplier", "head_dim", "lora_rank", "num_key_value_heads", "num_query_heads"),
)
# A sample with more values (32 GB of float32) was certainly never trained on.
_MOST_VALUES = 2**33
_ENORMOUS = 2**200  # products stay small enough to be computed quickly
# What Keras makes from these is not in the arrays of a checkpoint.
_LIMITS_OF_KERAS = {
    **dict.fromkeys(("ngrams", "num_thresholds", "num_mel_bins", "fft_length"), 10**6),
    "num_oov_indices": 10**7,
    "num_classes": 2**14,  # a metric has a matrix of n * n
    **dict.fromkeys(
        (
            *("n", "size", "padding", "cropping", "pool_size", "kernel_size", "strides"),
            *("dilation_rate", "height", "width", "num_tokens", "max_tokens", "repeats"),
            *("output_sequence_length", "sequence_length", "output_padding", "output_size"),
            *("frame_length", "sequence_stride", "pad_width", "num"),
        ),
        _MOST_VALUES,
    ),
}
_MOST_DEEP = 100


class Names(Protocol):
    """Looks up what the names in a config stand for."""

    def kind(self, module: str, name: str) -> Kind | None:
        """Returns the kind of an object of Keras; None if it does not exist or has another kind."""

    def is_registered(self, name: str) -> bool:
        """Returns True if the user has registered a class or function under this name."""

    def is_imported(self, module: str, name: str) -> bool:
        """Returns True if this is a model part defined in one of the user's imported modules."""


@dataclass(frozen=True)
class NamesBeforeImports:
    """Looks up names before the modules that define them are imported.

    Args:
        files: Keras' files.
        may_be_users: True if any other name may turn out to be the user's.
    """

    files: KerasFiles
    may_be_users: bool

    def kind(self, module: str, name: str) -> Kind | None:
        return self.files.kind(module, name)

    def is_registered(self, name: str) -> bool:
        return self.may_be_users

    def is_imported(self, module: str, name: str) -> bool:
        return self.may_be_users


def require_trusted(config: Any, elements: int, names: Names) -> None:
    """Checks a config before any object is built from it.

    Args:
        config: The config from `keras.saving.serialize_keras_object`, via JSON.
        elements: Total number of values in the arrays of the checkpoint.
        names: Looks up the names in it.

    Raises:
        ModelError: If an entry is not allowed, or too large for the arrays.
    """
    _Check(elements, names).check_entry(config, "model", 0)


def require_trusted_before_imports(
    config: Any, manifest: Manifest, modules: Collection[str]
) -> None:
    """Refuses a config before Keras is imported, if its fault can be known then.

    `save_rebuilt` checks it again, once the user's modules are imported.

    Args:
        config: The config of a model.
        manifest: The checkpoint's manifest.
        modules: The user's modules that will be imported.

    Raises:
        ModelError: The error that `save_rebuilt` would raise.
    """
    files = keras_files.find()
    if files is None:
        return
    names = NamesBeforeImports(files, bool(modules) or "keras" in sys.modules)
    try:
        require_trusted(config, list_elements(manifest), names)
    except ModelError as error:
        raise not_rebuilt(error) from error


def list_elements(manifest: Manifest) -> int:
    """Returns the total number of values in the arrays of a checkpoint."""
    return sum(math.prod(each.shape) for each in manifest.variables)


def not_rebuilt(error: Exception) -> ModelError:
    """Returns the error for a model that cannot be rebuilt, with advice."""
    return ModelError(
        f"The model of the run could not be rebuilt: {str(error).rstrip('.')}. Register custom "
        "classes and functions with @keras.saving.register_keras_serializable() in a module, and "
        "import the module before this call (for a command: with --import MODULE). Lambda layers "
        "cannot be rebuilt. "
        f"{EXPORT_INSTEAD}"
    )


@dataclass(frozen=True)
class _Check:
    elements: int
    names: Names

    def check_entry(self, config: Any, where: str, depth: int, of: str | None = None) -> None:
        """Checks an entry and the entries in it.

        Args:
            config: The entry.
            where: Its path.
            depth: Its depth.
            of: The Keras class whose arguments these are; None for other entries.
        """
        if depth > _MOST_DEEP:
            raise ModelError(f"its description is nested more than {_MOST_DEEP} levels deep.")
        arguments_of = None
        # Keras uses the same rule to distinguish objects from dictionaries.
        if isinstance(config, Mapping) and {"class_name", "config"} <= config.keys():
            self._require_allowed(config, where)
            if self._is_class_of_keras(config.get("module"), config["class_name"]):
                arguments_of = config["class_name"]
        for key, value in _parts(config):
            place = f"{where}/{_shown_key(key)}"
            self.check_entry(value, place, depth + 1, arguments_of if key == "config" else None)
            if isinstance(key, str):
                self._require_argument(key, value, place, of)

    def _require_allowed(self, config: Mapping[str, Any], where: str) -> None:
        """Raises if the object itself, apart from the objects in it, is not allowed."""
        name, module = config["class_name"], config.get("module")
        registered, inner = config.get("registered_name", name), config["config"]
        if not isinstance(name, str) or not isinstance(module, str | None):
            _refuse(where, f"class {_shown(name)} of module {_shown(module)}: expected two strings")
        if not isinstance(registered, str | None):
            _refuse(where, f"registered name {_shown(registered)}: expected a string")
        if name in _NEVER:
            _refuse(where, f"class {name} can run code or read files")
        if name in _ARRAYS:
            _require_plain(inner, where)
        # Keras looks up functions by `config` only, whatever their registered name is.
        elif name == "function":
            if not self._is_function(module, inner):
                _refuse(where, f"function {_shown(inner)} of module {_shown(module)}")
        elif name not in _PLAIN and not self._is_class(module, name, registered):
            _refuse(where, f"class {_shown(name)} of module {_shown(module)}")

    def _is_function(self, module: str | None, name: Any) -> bool:
        if not isinstance(name, str):
            return False
        if self.names.is_registered(name):
            return True
        kinds = (self._kind(f"keras.{part}", name) for part in FUNCTIONS_IN)
        return module == "builtins" and "function" in kinds

    def _is_class(self, module: str | None, name: str, registered: str | None) -> bool:
        if registered is not None and self.names.is_registered(registered):
            return True
        if module is not None and module.partition(".")[0] != "keras":
            return name.isidentifier() and self.names.is_imported(module, name)
        return self._is_class_of_keras(module, name)

    def _is_class_of_keras(self, module: str | None, name: str) -> bool:
        if module == "keras":
            return name in TOP_LEVEL and self._kind(module, name) == "class"
        if module is None:
            return any(self._kind(f"keras.{part}", name) == "class" for part in PARTS)
        return bool(_IN_PARTS.fullmatch(module)) and self._kind(module, name) == "class"

    def _kind(self, module: str, name: str) -> Kind | None:
        if not name.isidentifier() or name in _NOT_IN_CONFIGS:
            return None
        return self.names.kind(module, name)

    def _require_argument(self, key: str, value: Any, where: str, of: str | None) -> None:
        if key in _PATHS and isinstance(value, str):
            _refuse(where, f"path to a file, {_shown(value)}")
        # Other classes may use these words freely, such as for the names of outputs.
        if of is not None and (key in _SIZES or (key == "kernel_size" and "Conv" in of)):
            self._require_size(value, where)
        limit = _MOST_VALUES if key.endswith("shape") else None
        if of is not None:
            limit = _LIMITS_OF_KERAS.get(key, limit)
        if limit is not None and not all(size <= limit for size in _totals(value)):
            _refuse(where, f"{_shown(value)}, which is more than {limit}")

    def _require_size(self, value: Any, where: str) -> None:
        # Every comparison with NaN is false.
        if not all(size <= self.elements for size in _totals(value)):
            _refuse(
                where,
                f"{_shown(value)}, but all arrays of the checkpoint contain only {self.elements} "
                "values",
            )
        if isinstance(value, int | float) and value < 0:
            _refuse(where, f"{_shown(value)}, which is negative")


def _parts(config: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(config, Mapping):
        yield from config.items()
    elif isinstance(config, Sequence) and not isinstance(config, str):
        yield from enumerate(config)


def _totals(sizes: Any) -> Iterator[int | float]:
    """Yields a number, or for every list in a nested list the product of its numbers."""
    if isinstance(sizes, int | float):
        yield abs(sizes)
    elif isinstance(sizes, Sequence) and not isinstance(sizes, str):
        total = 1
        for each in sizes:
            if isinstance(each, float) and not each.is_integer():
                yield abs(each)  # such as NaN
            elif isinstance(each, int | float):
                total = min(total * max(1, abs(int(each))), _ENORMOUS)
            else:
                yield from _totals(each)
        yield total


def _require_plain(inner: Any, where: str) -> None:
    # A type such as NumPy's `U100000000` turns a short list into a large array.
    dtype = inner.get("dtype") if isinstance(inner, Mapping) else None
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        _refuse(where, f"data of type {_shown(dtype)}")


def _refuse(where: str, what: str) -> None:
    raise ModelError(f"Entry {where} of the model description is not allowed: {what}.")


def _shown_key(key: Any) -> str:
    return _cut(printable(str(key)))


def _shown(value: Any) -> str:
    # Python refuses to print the largest integers.
    if isinstance(value, int) and abs(value) > 10**100:
        return f"a number of {value.bit_length()} bits"
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
