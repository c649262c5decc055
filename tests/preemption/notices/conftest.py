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
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """What the package has said so far, each line once: `caplog` hears it here and at the root."""
    monkeypatch.setattr(logging.getLogger("keras_distplug"), "propagate", False)
    return lambda: caplog.messages
