"""Lines of the log can be read back, also by a later or an earlier version."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest

from keras_distplug.core import events
from keras_distplug.core.event_lines import from_line, to_line
from keras_distplug.core.events import Entry, Event, ReplicaTimes

SAMPLES: dict[str, Any] = {
    "str": "a",
    "str | None": None,
    "int": 3,
    "int | None": None,
    "float": 0.5,
    "float | None": 1.5,
    "bool": True,
    "tuple[int, ...]": (1, 2),
    "tuple[str, ...]": ("a", "b"),
    "Mapping[str, float]": {"step": 1.5},
    "Mapping[str, float | None]": {"loss": 0.5},
    "Mapping[str, str]": {"keras": "3.15.1"},
    "tuple[ReplicaTimes, ...]": (ReplicaTimes(0, 0.1), ReplicaTimes(1, 0.2, 0.3)),
}


def sample(kind: type[Event]) -> Event:
    return kind(**{each.name: SAMPLES[str(each.type)] for each in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", Event.kinds.values(), ids=list(Event.kinds))
def test_round_trip(kind: type[Event]) -> None:
    """Every event is written as a line of strict JSON and is equal when read back."""
    entry = Entry(1795461633.25, "worker-1", sample(kind), "job", 2)
    line = to_line(entry)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line)["v"] == events.VERSION
    assert from_line(line) == entry


def test_names() -> None:
    """The names occur in existing files, so they must not change."""
    assert set(Event.kinds) == {
        *("began", "restored", "window", "epoch_ended", "saved", "save_failed", "quarantined"),
        *("preempted", "slow_replica", "update_left_out", "rolled_back", "diverged", "hung"),
        *("raised", "beat", "lines_lost"),
        *("peer_lost", "finished", "started", "training", "failed", "again", "ended"),
        "started_again",
        "tracker_failed",
    }


def test_not_finite() -> None:
    """JSON has no NaN and no infinity."""
    ended = events.EpochEnded(0, 4, {"loss": math.nan, "mae": math.inf})
    line = to_line(Entry(1.0, "worker-0", ended))
    json.loads(line, parse_constant=pytest.fail)
    found = from_line(line)
    assert found is not None
    assert found.event == events.EpochEnded(0, 4, {"loss": None, "mae": None})


def hung_line(**fields: Any) -> bytes:
    """Returns a line of event `hung` with changed fields."""
    line = {"v": 1, "at": 1.0, "event": "hung", "source": "a", "job": None, "attempt": None}
    return json.dumps({**line, **fields}).encode()


@pytest.mark.parametrize(
    "line",
    [
        hung_line(event="future"),
        hung_line(v=2, event="future"),
        hung_line(v=2, source=5),
        hung_line(v=2),
    ],
    ids=["unknown event", "of a later version", "changed field", "removed field"],
)
def test_ignored(line: bytes) -> None:
    """A line that only another version understands is ignored, not refused."""
    assert from_line(line) is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "it is not JSON"),
        (b'{"v": 1, "at": 1.0, "event": "sav', "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[1]", "it is not a JSON object"),
        (b"[" * 100_000, "it is nested too deeply"),
        (hung_line(), "'what'"),
        (b"{}", "field 'v' is missing"),
        (hung_line(what="b", at="now"), "`at` to be float"),
        (hung_line(what="b", event=["hung"]), "`event` to be str"),
        (hung_line(what="b", at=-1.0), "`at` is not a valid time"),
        (hung_line(what="b", v=None), "`v` to be int"),
        (hung_line(what="b", at=math.nan), "NaN"),
        (hung_line(what=5), "`what` to be str"),
    ],
)
def test_refused(line: bytes, reason: str) -> None:
    """A line that no version writes is refused with the reason."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        from_line(line)


def test_later_version_that_fits() -> None:
    """A line of a later version is read if its fields fit."""
    assert from_line(hung_line(v=2, what="b")) == Entry(1.0, "a", events.Hung("b"))


def test_without_optional_fields() -> None:
    """The example in the docstring and lines without optional fields can be read."""
    example = re.search(r'\{"v": 1.*?\}', events.__doc__ or "", re.DOTALL)
    assert example is not None
    found = from_line(example[0].replace("\n", " ").encode())
    assert found is not None
    assert found.event == events.Saved(42, 0.31)
    for kind in Event.kinds.values():
        required = [each for each in dataclasses.fields(kind) if _is_required(each)]
        event = kind(**{each.name: SAMPLES[str(each.type)] for each in required})
        line = json.loads(to_line(Entry(1.0, "a", event)))
        names = ["v", "at", "event", "source", *(each.name for each in required)]
        assert from_line(json.dumps({name: line[name] for name in names}).encode()) == Entry(
            1.0, "a", event
        )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def test_number_beyond_float() -> None:
    """Lines with a number too large for a float, or an impossible time or size, are refused."""
    line = to_line(Entry(1.0, "worker-0", events.Hung("waits")))
    for number in (b"1" + b"0" * 400, b"1" + b"0" * 100, b"1e17", b"-1.0", b"NaN", b"1e999"):
        with pytest.raises(
            ValueError, match=r"not a valid time|not a JSON number|implausible value"
        ):
            from_line(line.replace(b"1.0", number))
    assert from_line(line.replace(b"1.0", b"1" + b"0" * 11)) is not None
    window = to_line(Entry(1.0, "worker-0", events.Window(4, 4, 0, {"step": 2.5})))
    assert from_line(window) is not None
    for number in (b"Infinity", b"1e16", b"1e308"):
        with pytest.raises(ValueError, match=r"not a JSON number|implausible value"):
            from_line(window.replace(b"2.5", number))


def test_unknown_field() -> None:
    """An unknown field is ignored and needs no new version."""
    entry = Entry(1.0, "worker-0", events.Hung("waits"))
    line = json.dumps({**json.loads(to_line(entry)), "colour": "red"}).encode()
    assert from_line(line) == entry
