from __future__ import annotations

from collections.abc import Iterator

import pytest
import stamina


@pytest.fixture
def tried_once() -> Iterator[None]:
    """A save that fails is not tried again: the storage stays as broken as a test has made it."""
    stamina.set_testing(True, attempts=1)
    yield
    stamina.set_testing(False)
