"""Logs that a checkpoint cannot hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_distplug.core.log import announce
from keras_distplug.python_state import json_values


class LostLogs:
    """Reports such logs, once per name.

    Args:
        is_chief: True if this worker reports.
    """

    def __init__(self, *, is_chief: bool) -> None:
        self._is_chief = is_chief
        self._known: set[str] = set()

    def report(self, logs: Mapping[str, Any]) -> None:
        """Reports those of `logs` that a checkpoint would lose."""
        lost = {name: value for name, value in logs.items() if not json_values.is_kept(value)}
        for name in lost.keys() - self._known if self._is_chief else ():
            kind = type(lost[name][-1] if isinstance(lost[name], list) else lost[name])
            announce(
                f"the entry {name!r} of `logs` has a value of type {kind.__qualname__}, which "
                "cannot be saved: after a restart, its earlier values in `History` will be None. "
                "Log numbers, text, arrays of numbers, or lists and dicts of these"
            )
        self._known |= lost.keys()
