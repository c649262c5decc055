"""The requirements of every store."""

from __future__ import annotations

import errno
import os

import pytest
from stores.conftest import STORES, Started
from stores.servers import Place

from keras_distplug.storage.contract import check_store
from keras_distplug.storage.files import Files, is_object_store, open_files
from keras_distplug.storage.stores.remote import RemoteFiles

pytestmark = [pytest.mark.stores, pytest.mark.timeout(300)]

COPYING = ("local", "memory", "moto", "ceph", "gcs")
OBJECT_STORES = ("memory", "moto", "ceph", "azurite", "gcs")
CANNOT = {
    # Google's emulator overwrites files that should only be created.
    "gcs": ("create_replaces_nothing", "one_writer_wins", "put_replaces_if_asked"),
}
OLD, NEW = b"old" * 1000, os.urandom(100_000)


@pytest.fixture
def files(place: Place) -> Files:
    return open_files(place.url, place.options)


@pytest.mark.parametrize("store", STORES)
def test_promises(store: str, stores: Started) -> None:
    """Every store keeps the promises of `Files`, except documented ones."""
    place = stores[store]
    check_store(lambda: open_files(place.url, place.options), skip=CANNOT.get(store, ()))


def test_listed_sizes(place: Place) -> None:
    """A listing of a store includes sizes, so that these are not requested one by one."""
    files = open_files(place.url, place.options)
    files.create("a/one", [OLD])
    files.create("a/two", [NEW])
    files.create("a/b/three", [NEW])
    reader = open_files(place.url, place.options)
    assert reader.names("a") == ["b", "one", "two"]
    if isinstance(reader, RemoteFiles):
        assert reader._sizes == {"a/one": len(OLD), "a/two": len(NEW)}
    assert (reader.size("a/one"), reader.size("a/two")) == (len(OLD), len(NEW))


@pytest.mark.parametrize("place", OBJECT_STORES, indirect=True)
def test_list_below_a_folder(files: Files, place: Place) -> None:
    """Object stores list all files below a folder with their sizes, and no others, and see the
    changes of other processes."""
    assert is_object_store(files)
    for path, content in (("a/one", OLD), ("a/b/c/two", NEW), ("ab/three", NEW), ("d", OLD)):
        files.create(path, [content])
    assert files.names_below("a") == ["b/c/two", "one"]
    assert files._sizes == {"a/one": len(OLD), "a/b/c/two": len(NEW)}  # type: ignore[attr-defined]
    other = open_files(place.url, place.options)
    assert is_object_store(other)
    other.delete_file("a/one")
    other.create("a/b/four", [OLD])
    assert files.names_below("a") == ["b/c/two", "b/four"]
    assert files.names_below("nothing") == []
    with pytest.raises(FileNotFoundError):
        files.size("a/one")


@pytest.mark.parametrize("place", OBJECT_STORES, indirect=True)
def test_delete_file(files: Files) -> None:
    """A file is deleted and no other; a file that does not exist is not an error."""
    assert is_object_store(files)
    for path in ("a/b", "a/bc", "a/c/b"):
        files.create(path, [OLD])
    for _ in range(2):
        files.delete_file("a/b")
    assert files.names_below("") == ["a/bc", "a/c/b"]


@pytest.mark.parametrize("place", sorted(STORES.keys() - set(OBJECT_STORES)), indirect=True)
def test_no_object_store(files: Files) -> None:
    """The other stores list folder by folder."""
    assert not is_object_store(files)


@pytest.mark.parametrize("place", COPYING, indirect=True)
def test_copy(files: Files) -> None:
    """These stores can copy."""
    files.create("a/b", [NEW])
    files.copy("a/b", "c/d")
    assert files.read("c/d") == NEW


@pytest.mark.parametrize("place", sorted(STORES.keys() - set(COPYING)), indirect=True)
def test_no_copy(files: Files) -> None:
    """The other stores raise an error for it."""
    files.create("a/b", [NEW])
    with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)):
        files.copy("a/b", "c/d")
    assert files.names("c") == []


def test_after_a_fork(files: Files) -> None:
    """A forked process makes its own requests."""
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


def test_url_of_a_file(files: Files, place: Place) -> None:
    assert files.where("a/b") == f"{place.url}/a/b"
    assert files.where() == place.url
