"""Untrusted folders: entries that are not regular files, links, and control characters."""

from __future__ import annotations

import os
import shutil
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import made
from storage.checkpoints import RUN, Checkpoints

from keras_distplug.core import events
from keras_distplug.core.errors import CheckpointError
from keras_distplug.core.event_lines import to_line
from keras_distplug.core.events import Entry
from keras_distplug.core.printable import printable
from keras_distplug.runlog import log_files
from keras_distplug.runlog.event_files import EventFiles
from keras_distplug.runlog.sinks import open_sink
from keras_distplug.storage import ownership, runs
from keras_distplug.storage.files import LinkError, create_private, open_files
from keras_distplug.storage.retention import Retention
from keras_distplug.storage.store import CheckpointStore

pytestmark = pytest.mark.timeout(60)

Say = Callable[..., tuple[int, str]]

PLACES = (
    f"{RUN}/RUN.json",
    f"{RUN}/MODEL.json",
    f"{RUN}/step-00000008/MANIFEST.json",
    f"{RUN}/step-00000008/DAMAGED.json",
    f"{RUN}/step-00000008/SHARD",
    f"{RUN}/step-00000008",
    f"{RUN}/log/20250101T000000Z-worker-0-aaaaaaaa.jsonl",
    f"{RUN}/log",
    "run-0002",
    ".owner",
    ".owner/0001.json",
)
COMMANDS = (
    ("ls",),
    ("show",),
    ("verify",),
    ("verify", "--deep"),
    ("goodput",),
    ("watch", "--once"),
    ("report", "--overwrite"),
    ("prune", "--keep-last", "1"),
)


def put(kind: str, path: Path) -> None:
    """Replaces a file by an entry of this kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        # Their paths are short.
        folder = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as made_one:
            made_one.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
    elif kind == "folder":
        path.mkdir()
    elif kind == "1 TB":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)


@pytest.mark.filterwarnings("ignore:.*is skipped")
@pytest.mark.parametrize("kind", ["FIFO", "socket", "folder", "1 TB", "device", "loop"])
def test_no_file(kind: str, tmp_path: Path, say: Say) -> None:
    """Every command finishes with one of its exit codes, whatever replaces a file, and the newest
    checkpoint stays intact."""
    for number, place in enumerate(PLACES):
        directory = tmp_path / str(number)
        made.run(directory, made.state(4), made.state(8), made.state(12))
        shard = next((directory / RUN / "step-00000008").rglob("*.safetensors"))
        path = shard if place.endswith("SHARD") else directory / place
        put(kind, path)
        for command, *options in COMMANDS:
            out = ["-o", tmp_path / "report.html"] if command == "report" else []
            code, printed = say(command, directory, *options, *out)
            assert code in (0, 1, 3), (place, command, printed)
            assert "Traceback" not in printed
        CheckpointStore(open_files(directory), RUN).verify("step-00000012")


def test_owner(tmp_path: Path) -> None:
    """A FIFO in place of an owner's record counts as an owner without a heartbeat."""
    files = open_files(tmp_path)
    made.run(tmp_path, made.state(4))
    put("FIFO", tmp_path / ownership.FOLDER / "0001.json")
    told: list[str] = []
    claimed = ownership.claim(files, told.append, timing=ownership.Timing(0.05, 0.3, 0.05))
    assert len(told) == 1
    assert (tmp_path / ownership.FOLDER / "0002.json").is_file()
    claimed.release()


def linked(directory: Path, elsewhere: Path, name: str) -> dict[str, bytes]:
    """Replaces a checkpoint by a link. Returns the contents of the target."""
    shutil.move(directory / RUN / name, elsewhere)
    (directory / RUN / name).symlink_to(elsewhere)
    return made.contents(elsewhere)


@pytest.mark.parametrize("place", ["elsewhere", f"runs/{RUN}/kept"])
def test_pruned_link_to_a_checkpoint(place: str, tmp_path: Path, say: Say) -> None:
    """`prune` keeps the target of a link. A link out of the run stays as well."""
    directory, target = tmp_path / "runs", tmp_path / place
    made.run(directory, *(made.state(step) for step in (4, 8, 12)))
    before = linked(directory, target, "step-00000004")
    code, printed = say("prune", directory, "--keep-last", "1")
    assert code == 0, printed
    assert made.contents(target) == before
    assert names_of(directory) == (
        ["step-00000004", "step-00000012"] if place == "elsewhere" else ["step-00000012"]
    )


@pytest.mark.parametrize("place", ["elsewhere", f"runs/{RUN}/kept"])
def test_outdated_link_to_a_checkpoint(place: str, tmp_path: Path) -> None:
    """Retention keeps the target of a link. A link out of the run stays as well."""
    directory, target = tmp_path / "runs", tmp_path / place
    made.run(directory, *(made.state(step) for step in (4, 8, 12)))
    before = linked(directory, target, "step-00000004")
    CheckpointStore(open_files(directory), RUN, Retention(keep_last=1)).clean("step")
    assert made.contents(target) == before
    assert names_of(directory) == (
        ["step-00000004", "step-00000012"] if place == "elsewhere" else ["step-00000012"]
    )


def names_of(directory: Path) -> list[str]:
    """The checkpoints of a run, without those that are links to nothing."""
    return sorted(each.name for each in (directory / RUN).glob("step-*"))


@pytest.mark.parametrize(
    "place",
    [
        f"{RUN}/RUN.json",
        f"{RUN}/step-00000008",
        f"{RUN}/step-00000008/MANIFEST.json",
        f"{RUN}/step-00000008/DAMAGED.json",
        f"{RUN}/log",
        f"{RUN}/log/20250101T000000Z-worker-0-aaaaaaaa.jsonl",
    ],
)
def test_link_out_of_the_run(place: str, tmp_path: Path, say: Say) -> None:
    """Readers do not follow a link out of the run's folder: they name it, and show the rest."""
    directory, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    logged_run(directory)
    logged_run(elsewhere, note="SECRET")
    (elsewhere / RUN / "step-00000008" / "DAMAGED.json").write_text('{"reason": "SECRET"}')
    path = directory / place
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(elsewhere / place)
    told = []
    for command, *options in COMMANDS:
        out = ["-o", tmp_path / "report.html"] if command == "report" else []
        code, printed = say(command, directory, *options, *out)
        # The exit code of `watch` is the state of the run.
        assert code in (0, 1) or command == "watch", (command, printed)
        assert "Traceback" not in printed
        assert "SECRET" not in printed
        told.append(printed)
        if command in ("ls", "verify"):
            assert "step-00000012" in printed
    assert "SECRET" not in (tmp_path / "report.html").read_text()
    assert any(f"outside of {directory / RUN}" in printed for printed in told)
    assert made.contents(elsewhere)


def logged_run(directory: Path, note: str = "it is slow") -> None:
    """A run with three checkpoints and a log."""
    made.run(directory, *(made.state(step) for step in (4, 8, 12)))
    began = events.Began("s", 0, 1, 1, "host", 1, "Strategy", 3, 0)
    window = events.Window(4, 4, 0, {"step": 2.5})
    lines = [began, window, events.Hung(note)]
    log = directory / RUN / "log" / "20250101T000000Z-worker-0-aaaaaaaa.jsonl"
    log.parent.mkdir()
    entries = [Entry(1.7e9 + 5 * at, "worker-0", event) for at, event in enumerate(lines)]
    log.write_bytes(b"".join(map(to_line, entries)))


def test_links_to_runs(tmp_path: Path, say: Say) -> None:
    """The directory, a run and a folder of experiments may be links: people move runs."""
    logged_run(tmp_path / "disk")
    (tmp_path / "all").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "all" / RUN).symlink_to(tmp_path / "disk" / RUN)
    for directory in (tmp_path / "runs", tmp_path / "all"):
        for command in ("ls", "verify", "goodput"):
            code, printed = say(command, directory)
            assert code == 0, printed
    (tmp_path / "all" / "experiment").symlink_to(tmp_path / "disk")
    (tmp_path / "all" / "loop").symlink_to(tmp_path / "all")
    found = [path for _, path in log_files.find(str(tmp_path / "all"), lambda *_: None)]
    assert found == ["experiment/run-0001"], "once, though three links lead there"


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("what", ["", "MANIFEST.json"])
def test_training_with_a_link_out_of_the_run(step: int, what: str, tmp_path: Path) -> None:
    """Training resumes from the newest other checkpoint and deletes old ones as usual. A warning
    says why the link is ignored."""
    directory, link = tmp_path / "runs", f"step-{step:08d}"
    made.run(directory, *(made.state(each) for each in (4, 8)))
    moved = tmp_path / "elsewhere"
    shutil.move(directory / RUN / link / what, moved)
    (directory / RUN / link / what).symlink_to(moved)
    files = open_files(directory)
    assert runs.newest_run(files).name == RUN  # type: ignore[union-attr]
    saving = Checkpoints(files)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = saving.newest("step")
    assert found is not None
    assert found.name == f"step-{12 - step:08d}"
    if step == 8:
        assert any("Replace the link with its target" in str(each.message) for each in warned)
    for later in (12, 16, 20, 24):
        saving.save(made.state(later))
    left = sorted(each.name for each in (directory / RUN).glob("step-*"))
    assert left[-2:] == ["step-00000020", "step-00000024"]
    assert len(left) <= 3, "the link stays, and no other old one"
    assert moved.exists()


def test_linked_run(tmp_path: Path, say: Say) -> None:
    """Old checkpoints of a run that was moved to another disk are deleted completely."""
    made.run(tmp_path / "disk", made.state(4))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / RUN).symlink_to(tmp_path / "disk" / RUN)
    saving = Checkpoints(open_files(tmp_path / "runs"))
    for step in (8, 12, 16):
        saving.save(made.state(step))
    left = [f"step-{step:08d}" for step in (12, 16)]
    assert sorted(each.name for each in (tmp_path / "disk" / RUN).glob("step-*")) == left
    code, printed = say("prune", tmp_path / "runs", "--keep-last", "1")
    assert code == 0, printed
    assert sorted(each.name for each in (tmp_path / "disk" / RUN).glob("step-*")) == left[1:]


def test_run_as_directory(tmp_path: Path) -> None:
    """Links out of a run are not followed either if a command is given the run itself."""
    made.run(tmp_path / "runs", made.state(4))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_text("SECRET")
    (tmp_path / "runs" / RUN / "step-00000099").symlink_to(tmp_path / "elsewhere")
    files = open_files(tmp_path / "runs" / RUN)
    for look in (files.names, files.size, files.read):
        with pytest.raises(LinkError, match="outside of"):
            look("step-00000099/a" if look != files.names else "step-00000099")


@pytest.mark.parametrize(
    "place", [f"{RUN}/log", f"{RUN}/step-00000012", "incidents", ownership.FOLDER]
)
def test_nothing_is_written_through_a_link(place: str, tmp_path: Path) -> None:
    """A training creates no file outside of its folder, wherever links lead."""
    directory, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    made.run(directory, made.state(4))
    elsewhere.mkdir()
    (directory / place).symlink_to(elsewhere)
    files = open_files(directory)
    creating = [
        lambda: files.create(f"{place}/0001.json", [b"x"]),
        lambda: create_private(files, f"{place}/0001.json", [b"x"]),
        lambda: files.put(directory / RUN / "RUN.json", f"{place}/0001.json", overwrite=True),
        lambda: files.copy(f"{RUN}/RUN.json", f"{place}/0001.json"),
        lambda: open_sink(files, f"{place}/worker").write(b"x"),
    ]
    if place.startswith(RUN):
        creating.append(lambda: EventFiles(files, f"{place}/goodput").add_scalar("a", 0.5, 1))
    for create in creating:
        with pytest.raises(LinkError, match="outside of"):
            create()
    assert not list(elsewhere.iterdir())


def test_terminal(tmp_path: Path, say: Say) -> None:
    """Escape sequences from files never reach the terminal: tables, lines, errors."""
    made.run(tmp_path, made.state(4, metrics={"\x1b[2Jloss\x9b": 1.0}))
    record = tmp_path / RUN / "RUN.json"
    record.write_text(record.read_text().replace("{", '{"\x1b]0;title\x07": 1,', 1))
    for command in ("ls", "show", "verify"):
        _, printed = say(command, tmp_path)
        assert not set(printed) & set(map(chr, (*range(9), *range(11, 32), *range(127, 160))))
    assert printable("a\tb\nc\x1b[31m\u202e\ud800") == "a\tb\nc\\x1b[31m\\u202e\\ud800"
    assert str(CheckpointError("\x1b[2J")) == "\\x1b[2J"


class Failing:
    """A sink that always fails."""

    every_secs = 0.0

    def __init__(self) -> None:
        self.writes = 0

    def write(self, text: bytes) -> None:
        self.writes += 1
        raise OSError("out of order")

    def close(self) -> None:
        pass


def test_pause_between_tries() -> None:
    """`flush` does not make the log retry without a pause."""
    sink = Failing()
    log = log_files.Log(sink, lambda error: None, lambda lines: None, lambda: None)
    log.append(b"{}\n")
    assert not log.flush(1.0)
    assert 1 <= sink.writes <= 20  # 100,000 without a pause
    log.close()
