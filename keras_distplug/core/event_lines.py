"""Events as lines of JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from keras_distplug.core.events import VERSION, Entry, Event, OfReplica, Window, name_of
from keras_distplug.core.hints import require_types

_YEAR_9999, _MOST_MEASURED = 253_402_300_799, 1e15
_HUGE = re.compile(rb"\d{200}")  # which no float can hold the sum of some of


def to_line(entry: Entry) -> bytes:
    said = {
        "v": VERSION,
        "at": entry.at,
        "event": name_of(type(entry.event)),
        "source": entry.source,
        "job": entry.job,
        "attempt": entry.attempt,
        **dataclasses.asdict(entry.event),
    }
    return json.dumps(_finite(said), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def from_line(line: bytes) -> Entry | None:
    """The inverse of `to_line`; None for what was cut off, or is not known here."""
    try:
        if _HUGE.search(line):
            return None
        said = json.loads(line, parse_constant=_refuse, parse_float=_number)
        kind = Event.kinds[said["event"]]
        if said["v"] > VERSION:
            return None
        values = _known(kind, said)
        if kind is Window:
            values["replicas"] = tuple(map(_of_replica, said.get("replicas", ())))
        event = kind(**values)
        require_types(event)
        entry = Entry(said["at"], said["source"], event, said["job"], said["attempt"])
        require_types(entry)
        if not 0 <= entry.at <= _YEAR_9999 or not all(map(_is_likely, said.items())):
            return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return entry


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON's")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _is_likely(said: tuple[str, Any]) -> bool:
    """Returns False for impossible times and sizes, whose sums could overflow."""
    name, value = said
    if isinstance(value, Mapping):
        return all(
            _is_likely((name if name == "secs" else key, each)) for key, each in value.items()
        )
    if isinstance(value, list):
        return all(_is_likely((name, each)) for each in value)
    is_measured = name == "secs" or name.endswith(("_secs", "_s", "_bytes"))
    return not (is_measured and isinstance(value, int | float)) or abs(value) <= _MOST_MEASURED


def _of_replica(said: Mapping[str, Any]) -> OfReplica:
    found = OfReplica(**_known(OfReplica, said))
    require_types(found)
    return found


def _known(kind: type, said: Mapping[str, Any]) -> dict[str, Any]:
    """What a class has of the fields of a line."""
    names = _names_of_fields(kind)
    return {name: _frozen(value) for name, value in said.items() if name in names}


@functools.cache
def _names_of_fields(kind: type) -> frozenset[str]:
    return frozenset(each.name for each in dataclasses.fields(kind))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
