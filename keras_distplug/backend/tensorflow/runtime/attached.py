"""What the package knows of a model, an optimizer or a variable, kept on the object itself.

In a weak dictionary, it would live for ever: what is known of a model refers to the model, by its
own methods, and the dictionary to that.
"""

from __future__ import annotations

from typing import Any, TypeVar

ATTACHED = "_distplug"

Kind = TypeVar("Kind")


def attach(owner: object, value: object) -> None:
    """Keeps `value`, one of its class, past Keras' tracking of attributes."""
    _all(owner)[type(value)] = value


def attached(owner: object, kind: type[Kind]) -> Kind | None:
    """What was attached of this class."""
    found: Kind | None = vars(owner).get(ATTACHED, {}).get(kind)
    return found


def detach(owner: object, kind: type) -> None:
    _all(owner).pop(kind, None)


class _Marks(set[str]):
    """What was done to an object."""


def mark(target: object, done: str = "adapted") -> bool:
    """Marks `target` as adapted, or what else was `done` to it. False if it was."""
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
