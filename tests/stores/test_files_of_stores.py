"""What every store has to do."""

from __future__ import annotations

import errno
import os

import pytest
from stores.conftest import STORES, Started
from stores.servers import Place

from keras_distplug.storage.contract import check_store
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.stores.remote import RemoteFiles

pytestmark = [pytest.mark.stores, pytest.mark.timeout(300)]

COPYING = ("local", "memory", "moto", "ceph", "gcs")
CANNOT = {
    # The emulator of Google's overwrites what should only be created.
    "gcs": ("create_replaces_nothing", "one_writer_wins", "put_replaces_if_asked"),
}
OLD, NEW = b"old" * 1000, os.urandom(100_000)


@pytest.fixture
def files(place: Place) -> Files:
    return open_files(place.url, place.options)


@pytest.mark.parametrize("store", STORES)
def test_promises(store: str, stores: Started) -> None:
    """Every store keeps what `Files` promise, except what it cannot."""
    place = stores[store]
    check_store(lambda: open_files(place.url, place.options), skip=CANNOT.get(store, ()))


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


@pytest.mark.parametrize("place", COPYING, indirect=True)
def test_copy(files: Files) -> None:
    """These stores can copy."""
    files.create("a/b", [NEW])
    files.copy("a/b", "c/d")
    assert files.read("c/d") == NEW


@pytest.mark.parametrize("place", sorted(STORES.keys() - set(COPYING)), indirect=True)
def test_no_copy(files: Files) -> None:
    """The other stores say that they have none."""
    files.create("a/b", [NEW])
    with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)):
        files.copy("a/b", "c/d")
    assert files.names("c") == []


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
