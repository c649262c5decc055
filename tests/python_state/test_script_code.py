"""Tests which code counts as the script's, and what it assigns."""

from __future__ import annotations

import dis
import inspect
import logging
import types

import pytest

keras = pytest.importorskip("keras")
pytestmark = pytest.mark.tf

import keras_distplug as kd  # noqa: E402
from keras_distplug.python_state import script_code  # noqa: E402


def test_functions_of_the_script() -> None:
    """Neither installed packages nor this one, even if its installation is editable."""
    assert script_code.is_function_of_script(test_functions_of_the_script)
    for library in (logging.getLogger, keras.utils.set_random_seed, kd.defaults):
        assert not script_code.is_function_of_script(library), library


def test_stored() -> None:
    """The names that `dis` lists, also in functions of more than 256 names, and of closures."""
    assignments = "; ".join(f"self.a{number} = {number}" for number in range(300))
    source = (
        f"def many(self, k):\n global g\n g = 1\n {assignments}\n"
        " def inner():\n  nonlocal k\n  k = 1\n  self.inner = k\n return inner\n"
    )
    made: dict[str, types.FunctionType] = {}
    exec(source, made)
    kinds = (keras.Model, keras.Sequential, keras.optimizers.Adam, kd.BackupAndRestore)
    methods = [each for kind in kinds for _, each in inspect.getmembers(kind, inspect.isfunction)]
    for function in (made["many"], *methods):
        for operation in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"):
            listed = _listed(function.__code__, operation)
            assert script_code.stored(function.__code__, operation) == listed, function
    assert len(script_code.stored(made["many"].__code__)) == 301
    assert script_code.stored(made["many"].__code__, "STORE_GLOBAL") == {"g"}
    assert script_code.stored(made["many"].__code__, "STORE_DEREF") == {"k"}


def _listed(code: types.CodeType, operation: str) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    own = {each.argval for each in dis.get_instructions(code) if each.opname == operation}
    return own.union(*(_listed(each, operation) for each in inner))
