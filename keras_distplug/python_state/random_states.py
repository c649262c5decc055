"""Saves and restores the random generators of a process, as JSON.

Keras' own are variables; these are the generators used by callbacks, Python data and operations
outside the model.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime import context, process_generators
from keras_distplug.python_state import json_values

_NUMPY, _PYTHON, _TORCH = "__numpy_random__", "__python_random__", "__torch_random__"


def capture() -> dict[str, Any]:
    """Returns the states of Python's, NumPy's, torch's and TensorFlow's global generators."""
    taken = {**capture_python(), "seed": context.global_seed()}
    if (seeds := process_generators.operation_seeds()) is not None:
        taken["operation_seeds"] = _packed(seeds.getstate())
    if (generator := process_generators.global_generator()) is not None:
        state = [int(word) for word in generator.state.numpy()]
        taken["tensorflow"] = [state, int(generator.algorithm)]
    return taken


def restore(taken: Mapping[str, Any]) -> None:
    """Restores the states from `capture`."""
    restore_python(taken)
    seed = taken.get("seed")
    if seed is not None and seed != context.global_seed():
        tf.random.set_seed(seed)  # affects operations that are not traced yet
    seeds = process_generators.operation_seeds()
    if seeds is not None and "operation_seeds" in taken:
        seeds.setstate(_unpacked(taken["operation_seeds"]))
    if "tensorflow" in taken:
        state, algorithm = taken["tensorflow"]
        process_generators.set_global_generator(tf.constant(state, tf.int64), algorithm)


def capture_python() -> dict[str, Any]:
    """Returns the states of the global generators of Python, NumPy and, if imported, torch."""
    name, key, place, has_gauss, cached_gaussian = np.random.get_state()
    taken: dict[str, Any] = {
        "python": _packed(random.getstate()),
        "numpy": [name, _text(np.asarray(key)), int(place), int(has_gauss), float(cached_gaussian)],
    }
    if (torch := imported_torch()) is not None:
        taken["torch"] = encode_generator(torch.default_generator)[_TORCH]
    return taken


def python_generator(taken: Mapping[str, Any]) -> random.Random:
    """Returns a generator that draws the same as Python's global one after `restore_python`."""
    made = random.Random()
    made.setstate(_unpacked(taken["python"]))
    return made


def restore_python(taken: Mapping[str, Any]) -> None:
    """Restores the states from `capture_python`."""
    random.setstate(_unpacked(taken["python"]))
    name, key, *rest = taken["numpy"]
    np.random.set_state((name, _words(key), *rest))
    torch = imported_torch()
    if torch is not None and "torch" in taken:
        restore_generator(torch.default_generator, {_TORCH: taken["torch"]})


def imported_torch() -> Any:
    """Returns torch, if the script has completely imported it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None


def is_generator(value: Any) -> bool:
    """Returns True if a value is a random generator of Python, NumPy or torch."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds) or _is_of_torch(value)


def _is_of_torch(value: Any) -> bool:
    torch = imported_torch()
    return torch is not None and isinstance(value, torch.Generator)


def encode_generator(generator: Any) -> dict[str, Any]:
    """Returns the state of a random generator, JSON-able."""
    if isinstance(generator, random.Random):
        return {_PYTHON: _packed(generator.getstate())}
    if _is_of_torch(generator):
        state = generator.get_state().numpy().tobytes()
        return {_TORCH: base64.b64encode(state).decode()}
    if isinstance(generator, np.random.RandomState):
        return {_NUMPY: json_values.encode(generator.get_state(legacy=False))}
    return {_NUMPY: json_values.encode(generator.bit_generator.state)}


def restore_generator(generator: Any, encoded: Mapping[str, Any]) -> None:
    """Restores the state that `encode_generator` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(_unpacked(encoded[_PYTHON]))
    elif _is_of_torch(generator):
        state = np.frombuffer(base64.b64decode(encoded[_TORCH]), np.uint8).copy()
        generator.set_state(imported_torch().from_numpy(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(json_values.decode(encoded[_NUMPY]))
    else:
        generator.bit_generator.state = json_values.decode(encoded[_NUMPY])


def _packed(state: tuple[Any, ...]) -> list[Any]:
    """Returns JSON for the result of `random.Random.getstate`."""
    version, words, gauss = state
    return [version, _text(np.array(words, np.uint32)), gauss]


def _unpacked(stored: list[Any]) -> tuple[Any, ...]:
    """The inverse of `_packed`."""
    version, words, gauss = stored
    return version, tuple(_words(words).tolist()), gauss


def _text(words: np.ndarray) -> str:
    return base64.b64encode(words.astype("<u4").tobytes()).decode()


def _words(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<u4").astype(np.uint32)
