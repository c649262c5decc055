"""Logs of runs that were forged or damaged."""

from __future__ import annotations

import contextlib
import json
import uuid
from typing import Any

import pytest
from fuzz.mutations import mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_distplug.core import events
from keras_distplug.core.event_lines import from_line, to_line
from keras_distplug.core.events import Entry, ReplicaTimes
from keras_distplug.runlog import goodput_totals
from keras_distplug.runlog.log_files import Reader
from keras_distplug.runlog.summary import summary
from keras_distplug.storage.files import open_files

LIMITS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
OF_WORKER = [
    events.Began("s", 0, 2, 2, "host", 1, "Strategy", 3, 0, {"keras": "3"}),
    events.Restored(1, 0, 1, "run/step-00000001", False, 0.1),
    events.Window(
        10, 9, 0, {"step": 4.0, "input": 1.0}, 0.4, 0.1, 10**6, (ReplicaTimes(0, 0.3, 0.1),)
    ),
    events.Saved(10, 0.5, False, 0.01, 1000),
    events.SaveFailed(11, 1, False, "why"),
    events.EpochEnded(0, 10, {"loss": 0.5}),
    events.Finished(20, 3, False),
]
OF_SUPERVISOR = [events.Started(("worker-0", "worker-1"), (0, 1)), events.Ended(0, "done")]


def said(kinds: list[events.Event], source: str) -> list[Any]:
    entries = [Entry(1000.0 + 5 * n, source, event, "job", 0) for n, event in enumerate(kinds)]
    return [json.loads(to_line(entry)) for entry in entries]


@LIMITS
@given(st.one_of(st.binary(), st.text().map(str.encode)))
def test_any_line(line: bytes) -> None:
    with contextlib.suppress(ValueError):
        from_line(line)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("secs", {"step": 4.0, "of_tomorrow": 1.0}),
        ("replicas", [{"replica": 0, "compute_s": 0.3, "of_tomorrow": [1]}]),
        ("of_tomorrow", {"a": 1}),
    ],
)
def test_later_release(field: str, value: Any) -> None:
    """Additions of a later release are ignored, and the rest is read."""
    [line] = said(OF_WORKER[2:3], "worker-0")
    entry = from_line(json.dumps(line | {field: value}).encode())
    assert entry is not None
    assert isinstance(entry.event, events.Window)
    assert entry.event.replicas[0].compute_s == 0.3
    made = goodput_totals.Timeline(0.0)
    spans = [*made.begin(0.0), *made.take(5.0, entry.event)]
    assert spans[-1].end == 5.0
    assert sum(spans[-1].secs.values()) == pytest.approx(5.0)


@LIMITS
@given(mutated(said(OF_WORKER, "worker-0"), most=6), mutated(said(OF_SUPERVISOR, "supervisor")))
def test_pages(of_worker: Any, of_supervisor: Any) -> None:
    """Readable lines are shown; others are skipped."""
    url = f"memory://{uuid.uuid4().hex}"
    files = open_files(url)
    for name, lines in (("a-worker-0", of_worker), ("supervisor-a", of_supervisor)):
        lines = lines if isinstance(lines, list) else [lines]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        files.create(f"run-0001/log/{name}.jsonl", [data])
    fits, supervised = Reader(files, "run-0001").read()
    shown = summary("run-0001", fits, supervised, 2000.0)
    json.dumps(shown, allow_nan=False)
    # A run without windows only has the times of its events.
    if shown["area"]["shares"]:
        length_s = shown["end"] - shown["begin"]
        most = max(1.0, abs(shown["begin"]), abs(shown["end"]))
        assert abs(sum(shown["secs"].values()) - length_s) < 1e-3 * most
    else:
        assert sum(shown["secs"].values()) == 0
    goodput_totals.attempts(fits, supervised)


def test_valid() -> None:
    """The original of the mutations above is read completely."""
    for kinds, source in ((OF_WORKER, "worker-0"), (OF_SUPERVISOR, "supervisor")):
        found = [from_line(json.dumps(line).encode()) for line in said(kinds, source)]
        assert [entry.event for entry in found if entry is not None] == kinds
