from __future__ import annotations

from collections.abc import Iterator

import pytest
import stamina


@pytest.fixture
def tried_once() -> Iterator[None]:
    """Failed saves are not retried: the storage stays broken as the test left it."""
    stamina.set_testing(True, attempts=1)
    yield
    stamina.set_testing(False)
