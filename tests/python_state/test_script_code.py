"""Tests which code counts as the script's."""

from __future__ import annotations

import logging

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
