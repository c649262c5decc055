"""Replaces a method on one object, past Keras' tracking of attributes."""

from __future__ import annotations

from typing import Any

_MARK = "_distplug_adapted"


def override(target: object, name: str, value: Any) -> None:
    object.__setattr__(target, name, value)


def mark(target: object) -> bool:
    """Marks `target` as adapted. False if it was."""
    if is_marked(target):
        return False
    override(target, _MARK, True)
    return True


def is_marked(target: object) -> bool:
    return bool(vars(target).get(_MARK, False))
