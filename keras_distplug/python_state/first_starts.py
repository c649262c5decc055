"""What callbacks held when this process first trained with them, for one that trains again.

A callback whose training failed still has what it held then. The checkpoint does not name what was
as at the start when it was made: that start is the first one, in this process or in an earlier one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keras_distplug.python_state.walk import Path

_firsts: dict[int, tuple[weakref.ref[Any], dict[Path, Start]]] = {}


@dataclass(frozen=True)
class Start:
    """A value when training started.

    Args:
        kind: Of the means to save it; "absent" if there was none.
        digest: Another one once the value has changed.
        number: The object's `id`.
        encoded: The value itself as JSON, of a small one without arrays.
        is_container: Whether it can change in place.
    """

    kind: str
    digest: Any
    number: int
    encoded: str | None
    is_container: bool


ABSENT = Start("absent", None, 0, None, False)


def since_first(
    owner: Any,
    starts: Mapping[Path, Start],
    is_changed: Callable[[Path], bool],
    is_made: Callable[[Path], bool],
) -> dict[Path, Start]:
    """Returns `starts`, with the first ones in place of what training has changed since.

    Args:
        owner: The callback, or the model.
        starts: Its values now, by path.
        is_changed: Tells by a path whether code that training calls assigns it.
        is_made: Tells by a path whether only such code makes it.
    """
    number = id(owner)
    known = _firsts.get(number)
    if known is None or known[0]() is not owner:
        reference = weakref.ref(owner, lambda _: _firsts.pop(number, None))
        _firsts[number] = (reference, dict(starts))
        return dict(starts)
    firsts = known[1]
    found: dict[Path, Start] = {}
    for path, start in starts.items():
        first = firsts.get(path)
        if first is None:
            found[path] = ABSENT if is_made(path) else firsts.setdefault(path, start)
        else:
            is_same = first.is_container and first.number == start.number
            found[path] = first if is_same or is_changed(path) else start
    return found
