"""The checks of a store pass if it keeps all promises, and name the broken ones otherwise."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage import Files, Traits, check_store, files, open_files
from keras_distplug.storage.contract import PROMISES
from keras_distplug.storage.stores.local import LocalFiles

METHODS = sorted(name for name in vars(Files) if not name.startswith("_"))


@pytest.mark.parametrize("store", ["local", "memory"])
def test_stores_that_keep_promises(store: str, tmp_path: Path) -> None:
    """The disk and the memory keep every promise, and the checks leave no files behind."""
    url = str(tmp_path / "root") if store == "local" else f"memory://{uuid.uuid4().hex}"
    check_store(lambda: open_files(url))
    assert open_files(url).names() == []


# Stores with a single fault


class Replaces(LocalFiles):
    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        super().delete(path)
        super().create(path, parts)


class Overwrites(LocalFiles):
    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.writelines(parts)
            file.flush()
            self.put(Path(file.name), path, overwrite=True)


class WritesInPlace(LocalFiles):
    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        where = Path(self.where(path))
        where.parent.mkdir(parents=True, exist_ok=True)
        with where.open("xb", buffering=0) as file:
            for part in parts:
                file.write(part)


class LosesTheLastPart(LocalFiles):
    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        super().create(path, [*parts][:1])


class AlwaysPuts(LocalFiles):
    def put(self, source: Path, path: str, *, overwrite: bool) -> None:
        super().put(source, path, overwrite=True)


class PutsInPlace(LocalFiles):
    def put(self, source: Path, path: str, *, overwrite: bool) -> None:
        if not overwrite or not Path(self.where(path)).exists():
            return super().put(source, path, overwrite=overwrite)
        with open(self.where(path), "wb", buffering=0) as file:
            for begin in range(0, max(1, source.stat().st_size), 2**18):
                file.write(source.read_bytes()[begin : begin + 2**18])
                time.sleep(0.01)


class CopiesLinks(LocalFiles):
    def copy(self, source: str, path: str) -> None:
        Path(self.where(path)).parent.mkdir(exist_ok=True)
        os.symlink(self.where(source), self.where(path))


class ReadsFromTheStart(LocalFiles):
    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        return super().read_into(path, 0, buffer)


class HasAllFiles(LocalFiles):
    def size(self, path: str) -> int:
        return super().size(path) if Path(self.where(path)).exists() else 0


class ListsInAnyOrder(LocalFiles):
    def names(self, folder: str = "") -> list[str]:
        return super().names(folder)[::-1]


class RemembersNames(LocalFiles):
    def names(self, folder: str = "") -> list[str]:
        known: dict[str, list[str]] = self.__dict__.setdefault("known", {})
        return known.setdefault(folder, super().names(folder))


class DeletesByPrefix(LocalFiles):
    def delete(self, path: str) -> None:
        where = Path(self.where(path))
        for each in where.parent.glob(f"{where.name}*"):
            shutil.rmtree(each) if each.is_dir() else each.unlink()


class DeletesTheFolder(LocalFiles):
    def delete_if_empty(self) -> None:
        shutil.rmtree(self.where())


class QuotesNames(LocalFiles):
    def names(self, folder: str = "") -> list[str]:
        return sorted(name.encode("ascii", "replace").decode() for name in super().names(folder))


class OneAtATime(LocalFiles):
    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        if self.__dict__.get("is_busy"):
            raise RuntimeError("busy")
        self.__dict__["is_busy"] = True
        time.sleep(0.001)
        super().create(path, parts)
        self.__dict__["is_busy"] = False


class HasNoPaths(LocalFiles):
    def where(self, path: str = "") -> str:
        return super().where()


class HasBadTraits(LocalFiles):
    traits = Traits(file_bytes=1, at_once=0, is_near=True)


FAULTS: Mapping[str, type[LocalFiles]] = {
    "created_files_are_whole": LosesTheLastPart,
    "create_replaces_nothing": Replaces,
    "one_writer_wins": Overwrites,
    "half_a_file_is_never_seen": WritesInPlace,
    "failed_files_do_not_exist": WritesInPlace,
    "put_replaces_if_asked": AlwaysPuts,
    "half_a_replacement_is_never_seen": PutsInPlace,
    "copies_are_files": CopiesLinks,
    "ranges_can_be_read": ReadsFromTheStart,
    "missing_files_are_reported": HasAllFiles,
    "names_are_listed": ListsInAnyOrder,
    "changes_of_others_are_seen": RemembersNames,
    "deleted_files_are_gone": DeletesByPrefix,
    "full_folders_stay": DeletesTheFolder,
    "any_name_is_possible": QuotesNames,
    "threads_share_files": OneAtATime,
    "places_have_names": HasNoPaths,
    "traits_are_usable": HasBadTraits,
}


@pytest.mark.parametrize("promise", [check.__name__ for check in PROMISES])
def test_broken_promise(promise: str, tmp_path: Path) -> None:
    """A broken promise is reported with its name and the received result."""
    others = {check.__name__ for check in PROMISES} - {promise}
    with pytest.raises(AssertionError, match=rf"(?m)^{promise}: `?\w.*(Received|Error)"):
        check_store(lambda: FAULTS[promise](tmp_path), skip=others)


def test_broken_promises(tmp_path: Path) -> None:
    """All broken promises are reported, and no others."""
    with pytest.raises(AssertionError, match="Broken promises") as raised:
        check_store(lambda: WritesInPlace(tmp_path))
    [_, *lines] = str(raised.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "half_a_file_is_never_seen",
        "failed_files_do_not_exist",
    ]


def test_skipped_promise(tmp_path: Path) -> None:
    """A promise that a store cannot keep can be skipped; an unknown name is refused."""
    check_store(lambda: HasBadTraits(tmp_path), skip=["traits_are_usable"])
    with pytest.raises(ValueError, match=r"traits_are_usable.*Received: \['traits'\]"):
        check_store(lambda: HasBadTraits(tmp_path), skip=["traits"])


# Registration


@pytest.fixture(autouse=True)
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_OPENERS", dict(files._OPENERS))


def test_registered_store(tmp_path: Path) -> None:
    """URLs of the scheme are opened with their options; the last opener of a scheme is used."""
    opened: list[Any] = []

    def open_lab(url: str, storage_options: Mapping[str, Any]) -> Files:
        opened.append((url, storage_options))
        return LocalFiles(tmp_path / url.removeprefix("lab-2+x.y://"))

    files.register_store("lab-2+x.y", print)  # type: ignore[arg-type]
    files.register_store("lab-2+x.y", open_lab)
    open_files("lab-2+x.y://host/a", {"user": "me"}).create("b", [b"here"])
    open_files("lab-2+x.y://host/a")
    assert opened == [("lab-2+x.y://host/a", {"user": "me"}), ("lab-2+x.y://host/a", {})]
    assert (tmp_path / "host/a/b").read_bytes() == b"here"
    with pytest.raises(
        ConfigurationError, match=r"one of memory://, s3://, .*, lab-2\+x\.y://\. Received"
    ):
        open_files("other://host/a")


@pytest.mark.parametrize("scheme", ["lab://", "Lab", "", "2lab", "la b", "lab:", None, 3])
def test_invalid_scheme(scheme: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Expected a URL scheme.*Received: .*Pass 'lab'"):
        files.register_store(scheme, LocalFiles)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["file", "local", "memory", "s3", "abfss", "ssh"])
def test_built_in_scheme(scheme: str) -> None:
    """A scheme with an existing meaning cannot be registered."""
    with pytest.raises(ConfigurationError, match=f"Received: '{scheme}'. Choose another"):
        files.register_store(scheme, LocalFiles)  # type: ignore[arg-type]


def test_not_callable() -> None:
    with pytest.raises(ConfigurationError, match=r"Expected a function.*Received: 'lab://x'"):
        files.register_store("lab", "lab://x")  # type: ignore[arg-type]


class Half(Files):  # type: ignore[misc]
    """Inherits methods that do nothing."""

    def read(self, path: str) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("given", "missing"),
    [(None, METHODS), (Half, [name for name in METHODS if name != "read"])],
    ids=["none", "inherited"],
)
def test_missing_methods(given: type[Files] | None, missing: list[str]) -> None:
    """The methods that an opened store lacks are named, including those that do nothing."""
    files.register_store("lab", lambda url, options: given() if given else None)  # type: ignore
    with pytest.raises(ConfigurationError, match=r"opener of lab:// .*Define them") as raised:
        open_files("lab://host/a")
    _, _, named = str(raised.value).partition(" without ")
    assert sorted(named.partition(". ")[0].split(", ")) == missing


def test_unknown_scheme() -> None:
    """The error for an unknown scheme names register_store as a remedy."""
    with pytest.raises(ConfigurationError, match=r"Received: lab://h/x\. .*register_store"):
        open_files("lab://me:pa55@h/x")
