"""Optional requirements of tests."""

from __future__ import annotations

import os

import pytest


def missing(what: str, how: str) -> None:
    """Skips a test because `what` is missing; fails it in CI."""
    message = f"{what} is not there. {how}"
    if os.environ.get("KERAS_DISTPLUG_TEST_ALL_STORES"):
        pytest.fail(message)
    pytest.skip(message)
