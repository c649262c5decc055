"""Stores the package's data about a model, an optimizer or a variable on the object itself.

Entries of a weak dictionary would never be freed: the data refers to the model through the model's
bound methods, and the dictionary refers to the data.
"""

from __future__ import annotations

from typing import Any, TypeVar

ATTACHED = "_distplug"

Kind = TypeVar("Kind")


def attach(owner: object, value: object) -> None:
    """Stores `value`, one per class, on `owner`, bypassing Keras' attribute tracking."""
    _all(owner)[type(value)] = value


def attached(owner: object, kind: type[Kind]) -> Kind | None:
    """Returns the attached object of this class, or None."""
    found: Kind | None = vars(owner).get(ATTACHED, {}).get(kind)
    return found


def detach(owner: object, kind: type) -> None:
    _all(owner).pop(kind, None)


class _Marks(set[str]):
    """The marks of an object: names of changes already made to it."""


def mark(target: object, done: str = "adapted") -> bool:
    """Marks `target` with `done`; returns False if it already had that mark."""
    if is_marked(target, done):
        return False
    _all(target).setdefault(_Marks, _Marks()).add(done)
    return True


def is_marked(target: object, done: str = "adapted") -> bool:
    return done in (attached(target, _Marks) or ())


def _all(owner: object) -> dict[type, Any]:
    if ATTACHED not in vars(owner):
        object.__setattr__(owner, ATTACHED, {})
    found: dict[type, Any] = vars(owner)[ATTACHED]
    return found
