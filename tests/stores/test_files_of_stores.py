"""What every store has to do."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from stores.conftest import STORES
from stores.servers import Place

from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.stores.remote import RemoteFiles

pytestmark = [pytest.mark.stores, pytest.mark.timeout(300)]

COPYING = ("local", "memory", "moto", "ceph", "gcs")
OLD, NEW = b"old" * 1000, os.urandom(100_000)


@pytest.fixture
def files(place: Place) -> Files:
    return open_files(place.url, place.options)


def test_create_and_read(files: Files) -> None:
    """What was created can be read, in parts, too; nothing else is left in its folder."""
    files.create("a/b/c.bin", [NEW[:70_000], memoryview(NEW)[70_000:]])
    files.create("empty", [b""])
    assert files.read("a/b/c.bin") == NEW
    assert files.read("empty") == b""
    assert (files.size("a/b/c.bin"), files.size("empty")) == (len(NEW), 0)
    assert files.names("a/b") == ["c.bin"]
    assert files.names() == ["a", "empty"]
    assert files.names("none") == []


def test_listed_sizes(place: Place) -> None:
    """Of a store, a listing tells sizes, too, which are not asked for one by one then."""
    files = open_files(place.url, place.options)
    files.create("a/one", [OLD])
    files.create("a/two", [NEW])
    files.create("a/b/three", [NEW])
    reader = open_files(place.url, place.options)
    assert reader.names("a") == ["b", "one", "two"]
    if isinstance(reader, RemoteFiles):
        assert reader._sizes == {"a/one": len(OLD), "a/two": len(NEW)}
    assert (reader.size("a/one"), reader.size("a/two")) == (len(OLD), len(NEW))


@pytest.mark.parametrize(
    ("offset", "size", "expected"),
    [(0, 100, 100), (99_000, 1000, 1000), (99_000, 5000, 1000), (100_000, 10, 0), (10**6, 10, 0)],
)
def test_read_into(files: Files, offset: int, size: int, expected: int) -> None:
    """A buffer gets what is there from an offset on."""
    files.create("a", [NEW])
    buffer = bytearray(size)
    assert files.read_into("a", offset, memoryview(buffer)) == expected
    assert buffer[:expected] == NEW[offset : offset + expected]


# The emulator of Google's has no such thing.
@pytest.mark.parametrize("place", sorted(STORES.keys() - {"gcs"}), indirect=True)
def test_create_is_exclusive(files: Files) -> None:
    """A file that exists stays as it is."""
    files.create("a/b", [OLD])
    with pytest.raises(FileExistsError):
        files.create("a/b", [NEW])
    assert files.read("a/b") == OLD
    assert files.names("a") == ["b"]


def test_missing(files: Files) -> None:
    """A file that is not there is told from one that cannot be read."""
    files.create("a/b", [OLD])
    for ask in (files.read, files.size):
        with pytest.raises(FileNotFoundError):
            ask("a/none")
    with pytest.raises(FileNotFoundError):
        files.read_into("a/none", 0, memoryview(bytearray(10)))
    files.delete("a/none")
    files.delete("none")


def test_what_others_write_is_seen(place: Place) -> None:
    """No listing is remembered."""
    mine, other = (open_files(place.url, place.options) for _ in range(2))
    for count in range(3):
        assert len(mine.names("a")) == count
        other.create(f"a/{count}", [OLD])
    other.delete("a/1")
    assert mine.names("a") == ["0", "2"]


def test_delete(files: Files) -> None:
    """A file, and a folder with all it holds; what stands beside it stays."""
    for path in ("a/b/c", "a/b/d/e", "a/bc", "ab"):
        files.create(path, [OLD])
    files.delete("a/b")
    assert files.names("a/b") == []
    assert files.names("a") == ["bc"]
    files.delete("ab")
    assert files.names() == ["a"]
    assert files.read("a/bc") == OLD


@pytest.mark.parametrize("place", COPYING, indirect=True)
def test_copy(files: Files) -> None:
    """A copy is whole, and a file of its own."""
    files.create("a/b", [NEW])
    files.copy("a/b", "c/d")
    with pytest.raises(FileExistsError):
        files.copy("a/b", "c/d")
    files.delete("a")
    assert files.read("c/d") == NEW


@pytest.mark.parametrize("place", sorted(STORES.keys() - set(COPYING)), indirect=True)
def test_no_copy(files: Files) -> None:
    """The other stores say that they have none."""
    files.create("a/b", [NEW])
    with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)):
        files.copy("a/b", "c/d")
    assert files.names("c") == []


def test_many_threads(files: Files) -> None:
    """Threads may use one folder at once."""
    threads = 8
    barrier = Barrier(threads)

    def one(index: int) -> bytes:
        barrier.wait(timeout=60)
        files.create(f"{index}/file", [bytes([index]) * 50_000])
        return files.read(f"{index}/file")

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(one, range(threads)))
    assert found == [bytes([index]) * 50_000 for index in range(threads)]


def test_after_a_fork(files: Files) -> None:
    """A process that was forked asks for itself."""
    files.create("a", [OLD])
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    else:
        try:
            os._exit(0 if files.read("a") == OLD else 1)
        finally:
            os._exit(2)
    assert files.read("a") == OLD


def test_where(files: Files, place: Place) -> None:
    assert files.where("a/b") == f"{place.url}/a/b"
    assert files.where() == place.url
