"""What tests need that need not be there."""

from __future__ import annotations

import os

import pytest


def missing(what: str, how: str) -> None:
    """Skips a test that needs `what`; fails it in CI."""
    message = f"{what} is not there. {how}"
    if os.environ.get("KERAS_DISTPLUG_TEST_ALL_STORES"):
        pytest.fail(message)
    pytest.skip(message)
