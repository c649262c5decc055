"""Optional requirements of tests."""

from __future__ import annotations

import importlib.util
import os

import pytest


def is_installed(module: str) -> bool:
    """A folder of that name, such as the one in which wandb keeps its files, is not enough."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def missing(what: str, how: str) -> None:
    """Skips a test because `what` is missing; fails it in CI."""
    message = f"{what} is not there. {how}"
    if os.environ.get("KERAS_DISTPLUG_TEST_ALL_STORES"):
        pytest.fail(message)
    pytest.skip(message)
