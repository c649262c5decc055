"""The positions of tqdm's bars, for tqdm is no dependency and its bars cannot be saved."""

from __future__ import annotations

import sys
from typing import Any

_POSITION = "__progress_bar__"


def is_bar(value: Any) -> bool:
    """Returns whether a value is a bar of tqdm."""
    tqdm = sys.modules.get("tqdm.std")
    return tqdm is not None and isinstance(value, tqdm.tqdm)


def encode(bar: Any) -> dict[str, Any]:
    """Returns the position of a bar, JSON-able."""
    return {_POSITION: bar.n}


def is_position(encoded: Any) -> bool:
    """Returns whether `encode` made this."""
    return isinstance(encoded, dict) and _POSITION in encoded


def seek(bar: Any, encoded: dict[str, Any]) -> None:
    """Moves a bar to a position. The rate that it shows counts from there."""
    bar.n = bar.last_print_n = bar.initial = encoded[_POSITION]
    bar.refresh()
