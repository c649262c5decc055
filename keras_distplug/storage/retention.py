"""Which checkpoints may go."""

from __future__ import annotations

from collections.abc import Sequence


def expired(oldest_first: Sequence[str], keep_last: int) -> tuple[str, ...]:
    """The checkpoints beyond the `keep_last` newest.

    Args:
        oldest_first: Names of committed checkpoints.
        keep_last: How many stay, at least 1.
    """
    if keep_last < 1:
        raise ValueError(f"`keep_last` must be >= 1. Received: {keep_last}")
    return tuple(oldest_first[:-keep_last])
