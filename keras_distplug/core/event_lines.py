"""Writes and parses events as lines of JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from keras_distplug.core.events import VERSION, Entry, Event, ReplicaTimes, Window, get_name
from keras_distplug.core.hints import require_types

_YEAR_9999, _MAX_MEASURED = 253_402_300_799, 1e15
_MAX = 1e200  # sums of larger numbers may exceed the largest float
_MAX_REASON_CHARS = 200  # longest error message, in characters


def to_line(entry: Entry) -> bytes:
    """Returns `entry` as a line of strict JSON."""
    fields = {
        "v": VERSION,
        "at": entry.at,
        "event": get_name(type(entry.event)),
        "source": entry.source,
        "job": entry.job,
        "attempt": entry.attempt,
        **dataclasses.asdict(entry.event),
    }
    return json.dumps(_finite(fields), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def from_line(line: bytes) -> Entry | None:
    """Parses a line that `to_line` wrote. Returns None for an event of another version.

    Raises:
        ValueError: If no version writes such a line. The message gives the reason.
    """
    fields: dict[str, Any] = {}
    try:
        fields = _DECODER.decode(line.decode())
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        return _entry(fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if (
            isinstance(fields, dict)
            and type(version := fields.get("v")) is int
            and version > VERSION
        ):
            return None
        raise ValueError(_reason(error)) from None


def _entry(fields: Mapping[str, Any]) -> Entry | None:
    require_types(_Header(fields["v"], fields["event"]))
    kind = Event.kinds.get(fields["event"])
    if kind is None:
        return None
    for name, value in fields.items():
        if value.__class__ is not str and _is_excessive(value, _limit(name)):
            raise ValueError(f"`{name}` has an implausible value")
    values = _known_fields(kind, fields)
    if kind is Window:
        values["replicas"] = tuple(map(_of_replica, fields.get("replicas", ())))
    event = kind(**values)
    require_types(event)
    entry = Entry(fields["at"], fields["source"], event, fields.get("job"), fields.get("attempt"))
    require_types(entry)
    if not 0 <= entry.at <= _YEAR_9999:
        raise ValueError(f"`at` is not a valid time: {entry.at:g}")
    return entry


@dataclasses.dataclass(frozen=True)
class _Header:
    v: int
    event: str


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "it is not JSON"
    reason = str(error)
    return reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[:_MAX_REASON_CHARS]}..."


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@functools.lru_cache(maxsize=1024)  # lines may have any names
def _limit(name: str) -> float:
    """Returns the largest number that a field may have, so that sums of times cannot overflow."""
    is_measured = name == "secs" or name.endswith(("_secs", "_s", "_bytes"))
    return _MAX_MEASURED if is_measured else _MAX


def _is_excessive(value: Any, limit: float) -> bool:
    """Returns True if `value` has a number beyond its limit."""
    kind = value.__class__
    if kind is float or kind is int:
        return not -limit <= value <= limit
    if kind is dict:
        for key, each in value.items():
            if _is_excessive(each, min(limit, _limit(key))):
                return True
    elif kind is list:
        for each in value:
            if _is_excessive(each, limit):
                return True
    return False


def _of_replica(fields: Mapping[str, Any]) -> ReplicaTimes:
    found = ReplicaTimes(**_known_fields(ReplicaTimes, fields))
    require_types(found)
    return found


def _known_fields(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those fields of a line that the class has."""
    names = _field_names(kind)
    return {
        name: tuple(value) if value.__class__ is list else value
        for name, value in fields.items()
        if name in names
    }


@functools.cache
def _field_names(kind: type) -> frozenset[str]:
    return frozenset(each.name for each in dataclasses.fields(kind))


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
