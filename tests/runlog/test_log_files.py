"""The log's files: no entry that could be written is lost."""

from __future__ import annotations

import re
import resource
import threading
import uuid
from pathlib import Path

import pytest

from keras_distplug.core import events
from keras_distplug.core.event_lines import from_line, to_line
from keras_distplug.core.events import Entry, Event
from keras_distplug.core.step_marker import StepMarker
from keras_distplug.core.supervised import Supervised
from keras_distplug.runlog import last_attempt, log_files, sinks
from keras_distplug.runlog.last_attempt import Before, find_earlier_attempts
from keras_distplug.runlog.log_files import Log, Reader, newest, open_beside, open_sink, read
from keras_distplug.storage.files import Files, open_files

RUN = "run-0001"


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return open_files(tmp_path if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def began(session: str = "a") -> events.Began:
    return events.Began(session, 0, 1, 1, "host", 1, "Strategy", 9, 0)


def line(event: Event, at: float = 1.0) -> bytes:
    return to_line(Entry(at, "worker-0", event))


def no_failure(error: OSError) -> None:
    pytest.fail(str(error))


def log(files: Files, stem: str = "one") -> Log:
    return Log(open_sink(files, f"{RUN}/log/{stem}"), no_failure)


def steps(files: Files) -> list[int]:
    [fit], _ = read(files, RUN)
    return [each.event.step for each in fit.entries if isinstance(each.event, events.Window)]


def test_reading_a_growing_file(files: Files) -> None:
    """Flushed lines can be read immediately, and all lines at the end. Lines of a file keep their
    order, however many there are."""
    written = log(files)
    written.append(line(began()))
    for number in range(40):
        written.append(line(events.Window(number, 1, 0, {"step": 1.0})))
        if number % 10 == 0:
            assert written.flush()
            assert steps(files) == [*range(number + 1)]
    written.close()
    assert steps(files) == [*range(40)]
    assert len(files.names(f"{RUN}/log")) == 1


def test_parts(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store, a part that is large enough is not written again."""
    monkeypatch.setattr(sinks, "_PART_BYTES", 500)
    written = log(files)
    written.append(line(began()))
    for number in range(20):
        written.append(line(events.Window(number, 1, 0, {"step": 1.0})))
        assert written.flush()
    written.close()
    assert steps(files) == [*range(20)]
    many = len(files.names(f"{RUN}/log"))
    assert many == 1 if files.traits.is_near else many > 3


def test_outdated_files_are_ignored() -> None:
    """Only the newest file of a part counts: a writer that was killed after a write has left the
    previous one as well."""
    parts = ["a.0001-000002.jsonl", "a.0001-000010.jsonl", "a.0002-000001.jsonl"]
    names = [*parts, "b.jsonl", "c.txt"]
    assert newest(names) == {("a", 1): names[1], ("a", 2): names[2], ("b", 0): "b.jsonl"}


def test_sources(files: Files) -> None:
    """Every worker's `fit` is returned separately, and supervisors' entries apart from them. A file
    without its first entry is ignored."""
    for stem, entries in {
        "late": [(5.0, began("b")), (6.0, events.Hung("waits"))],
        "early": [(1.0, began("a"))],
        "torn": [(0.5, events.Hung("waits"))],
        "supervisor-job": [(7.0, events.Ended(0, "")), (0.5, events.Started(("worker-0",), (0,)))],
    }.items():
        written = log(files, stem)
        for at, event in entries:
            written.append(line(event, at))
        written.close()
    fits, supervised = read(files, RUN)
    assert [fit.began.session for fit in fits] == ["a", "b"]
    assert [entry.at for entry in supervised] == [0.5, 7.0]


def test_truncated_line(tmp_path: Path) -> None:
    """A line that a kill has truncated is ignored."""
    written = log(open_files(tmp_path))
    written.append(line(began()))
    written.append(line(events.Window(1, 1, 0, {})))
    written.close()
    [path] = (tmp_path / RUN / "log").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert steps(open_files(tmp_path)) == []


class Fails:
    """A store that fails until it is fixed."""

    every_secs = 0.0

    def __init__(self) -> None:
        self.tried = threading.Semaphore(0)
        self.is_fixed = False
        self.written = b""

    def write(self, lines: bytes) -> None:
        self.tried.release()
        if not self.is_fixed:
            raise OSError("full")
        self.written += lines

    def close(self) -> None:
        pass


def test_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is reported once, and lines that could not be written are written as soon as
    possible."""
    monkeypatch.setattr(log_files, "_AGAIN_SECS", 0.01)
    sink, told = Fails(), list[str]()
    written = Log(sink, lambda error: told.append(str(error)))
    written.append(b"1\n")
    for _ in range(3):
        assert sink.tried.acquire(timeout=30)
    written.append(b"2\n")
    sink.is_fixed = True
    assert written.flush()
    written.close()
    assert sink.written == b"1\n2\n"
    assert told == ["full"]


def test_end_of_a_store_that_fails() -> None:
    """Closing does not wait for a store that fails, and memory for unwritten lines is limited."""
    sink, told = Fails(), list[str]()
    written = Log(sink, lambda error: told.append(str(error)))
    for _ in range(5):
        written.append(b"x" * 2**19)
    written.close()
    assert not written._thread.is_alive()
    assert told == ["full"]
    assert sum(len(each.text) for each in written._waiting) <= 2**20


def test_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an outage longer than the buffer can bridge, the first entry and the events are kept.
    Windows are dropped, the oldest first, and their number is logged."""
    monkeypatch.setattr(log_files, "_AGAIN_SECS", 0.01)
    monkeypatch.setattr(log_files, "_KEPT_BYTES", 4000)
    sink = Fails()
    written = Log(sink, lambda error: None, lambda count: line(events.LinesLost(count)))
    written.append(line(began()))
    assert sink.tried.acquire(timeout=30)
    for number in range(100):
        window = events.Window(number, 1, 0, {"step": 1.0})
        written.append(line(window, number), is_minor=True)
        if number % 10 == 0:
            written.append(line(events.Quarantined(f"step-{number}", "why"), number))
            assert sink.tried.acquire(timeout=30)
    sink.is_fixed = True
    assert written.flush()
    written.close()
    found = [entry.event for each in sink.written.splitlines() if (entry := from_line(each))]
    assert found[0] == began()
    set_aside = [each.checkpoint for each in found if isinstance(each, events.Quarantined)]
    assert set_aside == [f"step-{number}" for number in range(0, 100, 10)]
    kept = [each.step for each in found if isinstance(each, events.Window)]
    assert 0 < len(kept) < 100
    assert kept == [*range(100 - len(kept), 100)]
    [lost] = [each for each in found if isinstance(each, events.LinesLost)]
    assert lost.lines == 100 - len(kept)


def test_full_disk(tmp_path: Path) -> None:
    """A partial write to a full disk is undone: no line is duplicated or truncated."""
    files = open_files(tmp_path)
    sink = open_sink(files, f"{RUN}/log/one")
    sink.write(line(began()))
    path = tmp_path / RUN / "log" / "one.jsonl"
    size = path.stat().st_size
    lines = b"".join(line(events.Window(number, 1, 0, {})) for number in range(3))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + len(lines) // 2, most))
    try:
        with pytest.raises(OSError, match=r"one\.jsonl accepted only"):
            sink.write(lines)
        assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    sink.write(lines)
    sink.close()
    assert steps(files) == [0, 1, 2]
    assert path.stat().st_size == size + len(lines)


def test_reading_a_replaced_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader retries a file that was replaced after the listing. If that happens repeatedly, it
    still has the entries that it has already read."""
    files = open_files(f"memory://{uuid.uuid4().hex}")
    sink, reader = open_sink(files, f"{RUN}/log/one"), Reader(files, RUN)
    sink.write(line(began()))
    replaced, most = [0], [1]
    stock = type(files).size

    def size(self: Files, path: str) -> int:
        if replaced[0] < most[0]:
            replaced[0] += 1
            sink.write(line(events.Window(replaced[0], 1, 0, {"step": 1.0})))
        return stock(self, path)

    monkeypatch.setattr(type(files), "size", size)

    def read_steps() -> list[int]:
        [fit], _ = reader.read()
        return [each.event.step for each in fit.entries if isinstance(each.event, events.Window)]

    assert read_steps() == [1]
    assert replaced == [1]
    most[0] = 1000
    assert read_steps() == [1]
    most[0] = 0
    assert read_steps() == [*range(1, replaced[0] + 1)]


def test_notes_about_lines(files: Files) -> None:
    """A skipped line is reported once, briefly, with its number; blank lines are not reported."""
    notes: list[str] = []
    reader = Reader(files, RUN, notes.append)
    sink = open_sink(files, f"{RUN}/log/one")
    sink.write(line(began()) + b"\n" + b'{"v": 1, "' + b"x" * 10**6 + b'": 1}\n')
    for step in (1, 2, 3):
        sink.write(line(events.Window(step, 1, 0, {"step": 1.0})))
        [fit], _ = reader.read()
        assert len(fit.entries) == 1 + step
    sink.close()
    [note] = notes
    assert re.fullmatch(r".*/log/one.*\.jsonl, line 3 is skipped: field 'event' is missing", note)


@pytest.mark.parametrize(
    "text", [b'{"v": 1, "at": "' + b"x" * 10**6 + b'", "event": "hung"}', b"["]
)
def test_length_of_notes(text: bytes, files: Files) -> None:
    files.create(f"{RUN}/log/one.jsonl", [line(began()), text, b"\n"])
    notes: list[str] = []
    read(files, RUN, notes.append)
    [note] = notes
    assert len(note) < 600


def test_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats show that the writer of an otherwise silent log is alive; readers keep the last
    one."""
    monkeypatch.setattr(log_files, "_BEAT_SECS", 0.01)
    asked = threading.Semaphore(0)

    def beat() -> bytes:
        asked.release()
        return line(events.Beat())

    sink = open_sink(open_files(tmp_path), f"{RUN}/log/one")
    written = Log(sink, no_failure, beat=beat)
    written.append(line(began()))
    for _ in range(3):
        assert asked.acquire(timeout=30)
    written.close()
    [path] = (tmp_path / RUN / "log").iterdir()
    last = path.read_bytes().splitlines()[-1]
    assert path.read_bytes().count(b'"event":"beat"') >= 2
    [fit], _ = read(open_files(tmp_path), RUN)
    [beats] = [each for each in fit.entries if isinstance(each.event, events.Beat)]
    assert beats == from_line(last)


def test_supervisor_file_is_in_the_same_folder(tmp_path: Path) -> None:
    """The supervisor's file is next to those of the workers."""
    opened = open_beside(str(tmp_path), f"{RUN}/log", {}, "supervisor-job", no_failure)
    opened.append(line(events.Ended(0, "")))
    opened.close()
    assert [path.name for path in tmp_path.glob("run-0001/log/*")] == ["supervisor-job.jsonl"]


def test_earlier_attempts(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are counted by their sessions. The last step of the latest one is read from its log,
    and is exact if that attempt logged how it ended."""
    monkeypatch.setattr(sinks, "_PART_BYTES", 300)
    assert find_earlier_attempts(files, RUN, "worker-0") is None
    stems = [
        "20261122T101112Z-worker-0-3f0c9a1b",
        "20261122T101112Z-worker-1-3f0c9a1b",
        "20261122T111112Z-worker-1-aaaaaaaa",
        "20261122T111113Z-worker-0-aaaaaaaa",
        "supervisor-8d1e",
    ]
    for stem, last in zip(stems, (30, 31, 41, 40, 99), strict=True):
        written = log(files, stem)
        written.append(line(began()))
        for number in range(20, last + 1):
            written.append(line(events.Window(number, 1, 0, {"step": 1.0})))
            if not files.traits.is_near:
                assert written.flush()
        written.append(line(events.Beat()))
        written.close()
    before = find_earlier_attempts(files, RUN, "worker-0")
    assert before == Before(2, 40, has_told_all=False)
    assert find_earlier_attempts(files, RUN, "chief-0") is None
    assert before.loss(38) == "the log of attempt 2 ends at step 40"
    assert before.loss(40) == ""  # it may have trained more steps than its log has
    written = log(files, "20261122T121113Z-worker-0-bbbbbbbb")
    written.append(line(began()))
    written.append(line(events.Window(44, 1, 0, {"step": 1.0})))
    written.append(line(events.Raised("ValueError: no")))
    written.close()
    before = find_earlier_attempts(files, RUN, "worker-0")
    assert before == Before(3, 44, has_told_all=True)
    assert before.loss(43) == "1 step since that checkpoint was lost"
    assert before.loss(44) == "no steps were lost"


def test_exact_loss(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a supervisor, the number of lost steps is exact even if a process was killed before it
    could write its log."""
    supervised = Supervised("job", 1, tmp_path / "attempt-1")
    written = log(files, "20261122T111113Z-worker-0-aaaaaaaa")
    written.append(line(began()))
    written.append(line(events.Window(40, 1, 0, {"step": 1.0})))
    written.close()
    StepMarker(supervised.step_marker(files.where(RUN)), "aaaaaaaa", 30).store(47)
    before = find_earlier_attempts(files, RUN, "worker-0")
    assert before is not None
    assert before.loss(38) == "the log of attempt 1 ends at step 40"
    for name, value in supervised.to_env().items():
        monkeypatch.setenv(name, value)
    before = find_earlier_attempts(files, RUN, "worker-0")
    assert before == Before(1, 47, has_told_all=True)
    assert before.loss(38) == "9 steps since that checkpoint were lost"


def test_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of a file is read, however long it is; a line that is cut there is ignored."""
    monkeypatch.setattr(last_attempt, "_LAST_BYTES", 400)
    files = open_files(tmp_path)
    written = log(files, "20261122T101112Z-worker-0-3f0c9a1b")
    written.append(line(began()))
    for number in range(1000):
        written.append(line(events.Window(number, 1, 0, {"step": 1.0})))
    written.close()
    assert find_earlier_attempts(files, RUN, "worker-0") == Before(1, 999, has_told_all=False)
