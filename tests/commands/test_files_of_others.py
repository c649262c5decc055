"""Untrusted folders: entries that are not regular files, links, and control characters."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import made
from storage.checkpoints import RUN

from keras_distplug.core.errors import CheckpointError
from keras_distplug.core.printable import printable
from keras_distplug.runlog import log_files
from keras_distplug.storage import ownership
from keras_distplug.storage.files import open_files
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


def test_linked_checkpoint_is_pruned(tmp_path: Path, say: Say) -> None:
    """`prune` deletes the link and keeps its target."""
    directory = tmp_path / "runs"
    made.run(directory, *(made.state(step) for step in (4, 8, 12)))
    before = linked(directory, tmp_path / "elsewhere", "step-00000004")
    code, printed = say("prune", directory, "--keep-last", "1")
    assert code == 0, printed
    assert made.contents(tmp_path / "elsewhere") == before
    assert sorted(each.name for each in (directory / RUN).glob("step-*")) == ["step-00000012"]


def test_linked_checkpoint_is_outdated(tmp_path: Path) -> None:
    """Retention deletes the link and keeps its target."""
    directory = tmp_path / "runs"
    made.run(directory, *(made.state(step) for step in (4, 8, 12)))
    before = linked(directory, tmp_path / "elsewhere", "step-00000004")
    CheckpointStore(open_files(directory), RUN, Retention(keep_last=1)).clean("step")
    assert made.contents(tmp_path / "elsewhere") == before
    assert sorted(each.name for each in (directory / RUN).glob("step-*")) == ["step-00000012"]


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
