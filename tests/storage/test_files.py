"""Files that are created once and never changed."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, current_thread, get_ident
from typing import Any

import pytest
from forks import ending, kill_before, system_calls, together

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage.files import open_files
from keras_distplug.storage.stores.local import LocalFiles

OLD, NEW = b"old" * 1000, b"new" * 1000


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    return LocalFiles(tmp_path / "root")


def published(files: LocalFiles, folder: str = "") -> list[str]:
    """Returns the names that count: those that do not start with a dot."""
    return [name for name in files.names(folder) if not name.startswith(".")]


# Creating


def test_one_process_wins(files: LocalFiles) -> None:
    """If many processes create the same file, one succeeds, and the file has that process's
    content."""
    for round_ in range(10):
        path = f"round-{round_}/file"
        data = [bytes([index]) * 10_000 for index in range(6)]
        ended = together([partial(files.create, path, [each]) for each in data])
        assert sorted(ended) == [0, 1, 1, 1, 1, 1]
        assert files.read(path) == data[ended.index(0)]
        assert files.names(f"round-{round_}") == ["file"]


def replace_here(monkeypatch: pytest.MonkeyPatch, call: str, function: Callable[..., Any]) -> None:
    """Replaces a function of `os` in this thread. Others are not affected, such as the heartbeat
    of a directory that an earlier test has claimed."""
    stock, here = getattr(os, call), get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if get_ident() == here else stock)(*args, **kwargs)

    monkeypatch.setattr(os, call, called)


def test_create_is_durable(files: LocalFiles) -> None:
    """The content is on disk before it gets its name, and the name before `create` returns."""
    files.create("a/before", [OLD])
    calls = system_calls(lambda: files.create("a/b", [NEW]))
    link = calls.index("link")
    assert "fsync" in calls[calls.index("flush") : link]
    assert calls.index("write") < calls.index("flush")
    assert "fsync" in calls[link:]


def test_large_files_are_flushed_while_they_are_written(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flushing starts before the last part is written; a failed flush is reported even if the last
    one succeeds."""
    monkeypatch.setattr("keras_distplug.storage.stores.local._FLUSH_BYTES", 10)
    has_started, fsync = Event(), os.fsync
    failures: list[OSError] = []

    def flush(descriptor: int) -> None:
        if "flush" not in current_thread().name:
            return fsync(descriptor)
        has_started.set()
        if failures:
            raise failures[0]

    def parts() -> Iterator[bytes]:
        yield NEW * 10
        has_started.clear()
        yield NEW * 10
        assert has_started.wait(timeout=60)
        yield NEW

    monkeypatch.setattr(os, "fsync", flush)
    files.create("a/b", parts())
    assert files.read("a/b") == NEW * 21
    failures.append(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        files.create("a/c", parts())
    assert files.names("a") == ["b"]


def test_large_file_at_the_end_of_a_process(tmp_path: Path) -> None:
    """A process that is exiting starts no thread; the file is written nevertheless."""
    script = f"""
import atexit, os, threading
from pathlib import Path
from keras_distplug.storage.stores import local
local._FLUSH_BYTES = 10
os.fsync = lambda descriptor: print(threading.current_thread().name, flush=True)
files = local.LocalFiles(Path({str(tmp_path)!r}))
files.create("before", [b"0123456789"] * 3)
atexit.register(files.create, "after", [b"0123456789"] * 3)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert set(ran.stdout.split()) == {"keras_distplug-flush", "MainThread"}
    assert ran.stderr == ""
    assert (tmp_path / "before").read_bytes() == b"0123456789" * 3
    assert (tmp_path / "after").read_bytes() == b"0123456789" * 3


def test_new_folders_are_durable(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a new folder is on disk before a file in it gets its name."""
    synced: list[str] = []
    fsync, link = os.fsync, os.link

    def watched_fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def watched_link(source: Any, target: Any) -> None:
        synced.append("linked")
        link(source, target)

    replace_here(monkeypatch, "fsync", watched_fsync)
    replace_here(monkeypatch, "link", watched_link)
    files.create("a/b/c", [NEW])
    root = Path(files.where())
    before, after = synced[: synced.index("linked")], synced[synced.index("linked") + 1 :]
    assert {str(root.parent), str(root), str(root / "a")} <= set(before)
    assert after == [str(root / "a/b")]


# Kills


def test_kill_at_every_call(tmp_path: Path) -> None:
    """A process that is killed at any system call of `create` leaves a complete file, or none of
    that name."""
    kills, whole = 0, []
    for number in itertools.count(1):
        files = LocalFiles(tmp_path / str(number))

        def create(files: LocalFiles = files, number: int = number) -> None:
            kill_before(number)
            files.create("a/b", [NEW])

        ended = ending(create)
        whole.append(published(files, "a") == ["b"])
        assert not whole[-1] or files.read("a/b") == NEW
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        kills += 1
        if not whole[-1]:
            files.create("a/b", [OLD])
            assert files.read("a/b") == OLD
    calls = system_calls(lambda: LocalFiles(tmp_path / "once").create("a/b", [NEW]))
    assert kills == len(calls)
    assert {"mkdir", "open", "write", "flush", "fsync", "link", "unlink", "close"} <= set(calls)
    # All kills before the link left nothing; all later ones left the file.
    assert whole == [False] * (calls.index("link") + 1) + [True] * (kills - calls.index("link"))


def test_copy_uses_no_space(files: LocalFiles) -> None:
    """A copy is another name of the same file."""
    files.create("a/b", [OLD])
    files.copy("a/b", "c/d")
    assert os.path.samefile(files.where("a/b"), files.where("c/d"))


def test_death_in_the_middle_of_a_write(files: LocalFiles) -> None:
    """A process that dies after half of the bytes leaves no file of that name."""

    def create() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        files.create("a/b", [NEW])

    assert ending(create) == -signal.SIGXFSZ
    [left] = files.names("a")
    assert files.read(f"a/{left}") == NEW[:1000]
    assert published(files, "a") == []
    files.create("a/b", [NEW])
    assert files.read("a/b") == NEW


# Failures


def test_file_too_large(files: LocalFiles) -> None:
    """A write that fails halfway raises OSError and leaves nothing behind."""
    files.create("a/b", [OLD])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            files.create("a/c", [NEW])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    assert files.names("a") == ["b"]
    files.create("a/c", [NEW])
    assert files.read("a/c") == NEW


FULL = """
import errno, sys
from pathlib import Path
from keras_distplug.storage.stores.local import LocalFiles

files = LocalFiles(Path(sys.argv[1]))
files.create("a/b", [b"old" * 1000])
for _ in range(3):
    try:
        files.create("a/c", [bytes(10**6)])
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    else:
        raise AssertionError("there was room")
    assert files.names("a") == ["b"], files.names("a")
files.create("a/c", [bytes(10**5)])
assert files.read("a/b") == b"old" * 1000
print("full and well")
"""


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="no permission to mount a small disk; test_file_too_large is similar",
)
def test_disk_full(tmp_path: Path) -> None:
    """A full disk raises OSError, nothing is left behind, and the space is freed."""
    mount = 'mount -t tmpfs -o size=256k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "full and well\n", done.stderr


# The parents of two new folders, the content, and the folder of the file are synced.
@pytest.mark.parametrize(("call", "count"), [("fsync", 4), ("link", 1)])
def test_failing_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, count: int
) -> None:
    """If the disk fails at any sync or at the link, OSError is raised and the file does not
    exist."""
    real = getattr(os, call)
    numbers: Iterator[int]

    def fail(*args: Any) -> None:
        if next(numbers) == failing:
            raise OSError(errno.EIO, "broken")
        real(*args)

    replace_here(monkeypatch, call, fail)
    for failing in range(1, count + 1):
        numbers = itertools.count(1)
        files = LocalFiles(tmp_path / str(failing))
        with pytest.raises(OSError, match="broken"):
            files.create("a/b", [NEW])
        assert files.names("a") == []
    numbers, failing = itertools.count(1), 0
    LocalFiles(tmp_path / "well").create("a/b", [NEW])
    assert next(numbers) == count + 1


@pytest.mark.parametrize("code", ["EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EMLINK"])
def test_no_hard_links(files: LocalFiles, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Without hard links, a file system keeps files too, and does not overwrite them."""
    refused = []

    def link(source: Any, target: Any) -> None:
        refused.append(target)
        raise OSError(getattr(errno, code), code)

    replace_here(monkeypatch, "link", link)
    files.create("a/b", [OLD])
    with pytest.raises(FileExistsError):
        files.create("a/b", [NEW])
    assert files.read("a/b") == OLD
    assert files.names("a") == ["b"]
    assert len(refused) == 2


def test_lost_reply(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that creates the link, then reports that it already exists, has created it."""
    real = os.link

    def link_twice(source: Any, target: Any) -> None:
        real(source, target)
        real(source, target)

    replace_here(monkeypatch, "link", link_twice)
    files.create("a/b", [OLD])
    with pytest.raises(FileExistsError):
        files.create("a/b", [NEW])
    assert files.read("a/b") == OLD


# Listing and deleting


def test_delete_is_durable(files: LocalFiles) -> None:
    """A deletion is on disk before `delete` returns."""
    files.create("a/b", [NEW])
    for path, call in (("a/b", "unlink"), ("a", "rmdir")):
        calls = system_calls(lambda path=path: files.delete(path))
        assert "fsync" in calls[calls.index(call) :]


# Opening


def test_open_creates_nothing(tmp_path: Path) -> None:
    """Opening a folder that does not exist creates nothing; creating the first file does."""
    files = open_files(tmp_path / "a/b")
    assert files.names() == []
    assert list(tmp_path.iterdir()) == []
    files.create("c", [NEW])
    assert (tmp_path / "a/b/c").read_bytes() == NEW


@pytest.mark.parametrize("prefix", ["", "file://", "local://"])
def test_urls(tmp_path: Path, prefix: str) -> None:
    """A folder is a path, or the URL of a path."""
    files = open_files(f"{prefix}{tmp_path}/with space/ä")
    files.create("c", [NEW])
    assert (tmp_path / "with space/ä/c").read_bytes() == NEW
    assert files.where("c") == f"{tmp_path}/with space/ä/c"


def test_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path does not change its meaning with the working directory."""
    monkeypatch.chdir(tmp_path)
    files = open_files("runs/mnist")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    files.create("c", [NEW])
    assert files.where() == str(tmp_path / "runs/mnist")
    assert (tmp_path / "runs/mnist/c").exists()


@pytest.mark.parametrize(
    "url", ["https://host/x", "ftp://me:pa55@host/x", "simplecache::s3://b", "hdfs://n/x"]
)
def test_unknown_store(url: str) -> None:
    """An unknown kind of URL is refused, and named without its password."""
    named = re.escape(url.replace("me:pa55@", ""))
    with pytest.raises(ConfigurationError, match=f"Received: {named}.* Mount") as raised:
        open_files(url)
    assert "pa55" not in str(raised.value)


def test_options_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"`storage_options` only with the URL.*a local folder"
    ):
        open_files(tmp_path, {"key": "a"})


@pytest.mark.parametrize("below", ["", "/run", "/a/b/c"])
def test_not_a_folder(tmp_path: Path, below: str) -> None:
    """A file, or a path below a file, is not a folder; the message names the file."""
    (tmp_path / "taken").write_bytes(OLD)
    with pytest.raises(ConfigurationError, match=f"where {tmp_path}/taken is"):
        open_files(f"{tmp_path}/taken{below}")
    assert (tmp_path / "taken").read_bytes() == OLD


@pytest.mark.parametrize("below", ["", "/run"])
def test_dangling_link(tmp_path: Path, below: str) -> None:
    """A broken link is not a folder."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="broken link"):
        open_files(f"{tmp_path}/link{below}")


def test_link_to_a_folder(tmp_path: Path) -> None:
    """A link to a folder works like the folder."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    open_files(tmp_path / "link").create("a/b", [NEW])
    assert (tmp_path / "folder/a/b").read_bytes() == NEW


def test_mounts_that_cannot_sync_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a folder cannot be synced (EINVAL), files are created nevertheless; EIO is an error."""
    fsync, refused = os.fsync, []

    def folders_refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(descriptor)
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    replace_here(monkeypatch, "fsync", folders_refuse)
    files = open_files(tmp_path)
    code = errno.EINVAL
    files.create("a", [NEW])
    assert files.read("a") == NEW
    assert refused
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        files.create("b", [NEW])
