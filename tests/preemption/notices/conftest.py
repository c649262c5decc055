from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from mock_metadata import Mock, serving


@pytest.fixture
def mock() -> Iterator[Mock]:
    with serving() as mock:
        yield mock


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Returns the package's log lines so far, once: `caplog` also receives them from the root."""
    monkeypatch.setattr(logging.getLogger("keras_distplug"), "propagate", False)
    return lambda: caplog.messages
