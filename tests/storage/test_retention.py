"""Which checkpoints may go."""

from __future__ import annotations

import pytest

from keras_distplug.storage.retention import expired


@pytest.mark.parametrize(
    ("oldest_first", "keep_last", "gone"),
    [
        ("abcd", 1, "abc"),
        ("abcd", 3, "a"),
        ("abcd", 4, ""),
        ("abcd", 9, ""),
        ("", 1, ""),
    ],
)
def test_expired(oldest_first: str, keep_last: int, gone: str) -> None:
    """All but the newest `keep_last` may go."""
    assert expired(list(oldest_first), keep_last) == tuple(gone)


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keep_nothing(keep_last: int) -> None:
    """At least one checkpoint stays."""
    with pytest.raises(ValueError, match="keep_last"):
        expired(["a", "b"], keep_last)
