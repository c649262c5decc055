"""The contract of `Files`, as checks that run on any store without a test framework."""

from __future__ import annotations

import errno
import functools
import reprlib
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from keras_distplug.storage.files import Files

_OLD, _NEW = b"old" * 1000, bytes(range(256)) * 400
_WRITERS, _ROUNDS = 8, 5
_SECS = 0.01  # between two parts of a file, so that a reader can see half of it
Open = Callable[[], Files]
Check = Callable[[Open, str], None]


def check_store(open: Open, *, skip: Collection[str] = ()) -> None:
    """Checks that a store keeps the promises that checkpoints rely on.

    It creates files in a new subfolder, which it deletes at the end.

    Example:

    ```python
    from keras_distplug.storage import check_store

    check_store(lambda: LabFiles("lab://host/test", {}))
    ```

    Args:
        open: A function that returns a new object for one folder, always the same one. It is
            called many times: promises between processes are checked between two such objects.
        skip: Names of promises that the store cannot keep, such as `"one_writer_wins"`. Defaults
            to none.

    Raises:
        AssertionError: If the store breaks promises. The message names all of them, with the
            expected and the received result.
        ValueError: If a name in `skip` is not that of a promise.
    """
    if unknown := set(skip) - {check.__name__ for check in PROMISES}:
        known = ", ".join(check.__name__ for check in PROMISES)
        raise ValueError(
            f"Expected `skip` to contain only names of promises: {known}. Received: "
            f"{sorted(unknown)}"
        )
    root, broken = f"check-{uuid.uuid4().hex}", list[str]()
    cause: Exception | None = None
    for check in PROMISES:
        if check.__name__ not in skip:
            try:
                check(open, f"{root}/{check.__name__}")
            except Exception as error:  # noqa: BLE001 (a store may raise any error)
                seen = str(error) if isinstance(error, AssertionError) else repr(error)
                says = " ".join(str(check.__doc__).split())
                broken.append(f"{check.__name__}: {says} {seen}")
                cause = cause or error
    try:
        open().delete(root)
    except Exception as error:  # noqa: BLE001
        broken.append(f"the folder of the checks could not be deleted: {error!r}")
        cause = cause or error
    if broken:
        raise AssertionError("Broken promises of the store:\n" + "\n".join(broken)) from cause


def created_files_are_whole(open: Open, folder: str) -> None:
    """`create` makes a file of all parts, even an empty file, and leaves no other files."""
    files = open()
    files.create(f"{folder}/a/b.bin", [_NEW[:70_000], memoryview(_NEW)[70_000:]])
    files.create(f"{folder}/empty", [b""])
    files.create(f"{folder}/no parts", [])
    for path, content in (("a/b.bin", _NEW), ("empty", b""), ("no parts", b"")):
        for each in (files, open()):
            _expect(f"read({path!r})", content, each.read(f"{folder}/{path}"))
            _expect(f"size({path!r})", len(content), each.size(f"{folder}/{path}"))
    _expect("names of the folder", ["b.bin"], files.names(f"{folder}/a"))


def create_replaces_nothing(open: Open, folder: str) -> None:
    """`create` raises FileExistsError if the file exists, and does not change it."""
    for path, content in ((f"{folder}/a/b", _OLD), (f"{folder}/a/empty", b"")):
        open().create(path, [content])
        for _ in range(2):
            again = functools.partial(open().create, path, [_NEW])
            _expect_error(FileExistsError, "create", again)
        _expect("read() after that", content, open().read(path))
    _expect("names of the folder", ["b", "empty"], open().names(f"{folder}/a"))


def one_writer_wins(open: Open, folder: str) -> None:
    """If several writers create the same file at the same time, exactly one succeeds."""
    barrier = threading.Barrier(_WRITERS)
    stores = [open() for _ in range(_WRITERS)]

    def create(path: str, index: int) -> bool:
        barrier.wait(60)
        try:
            stores[index].create(path, [bytes([index]) * 10_000])
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(_WRITERS) as pool:
        for attempt in range(_ROUNDS):
            path = f"{folder}/{attempt}/file"
            won = list(pool.map(functools.partial(create, path), range(_WRITERS)))
            _expect("writers that succeeded", 1, won.count(True))
            _expect("read()", bytes([won.index(True)]) * 10_000, open().read(path))
            _expect("names of the folder", ["file"], open().names(f"{folder}/{attempt}"))


def half_a_file_is_never_seen(open: Open, folder: str) -> None:
    """A file that is being created is either not listed, or has all of its content."""

    def parts() -> Iterator[bytes]:
        for begin in range(0, len(_NEW), len(_NEW) // 10):
            yield _NEW[begin : begin + len(_NEW) // 10]
            time.sleep(_SECS)

    seen = _read_during(open, folder, lambda: open().create(f"{folder}/a", parts()))
    _expect("sizes of contents read during `create`", {len(_NEW)}, {*map(len, seen)})
    _expect("contents read during `create`", {_NEW}, seen)


def failed_files_do_not_exist(open: Open, folder: str) -> None:
    """A `create` that fails raises the error and leaves no file of that name; the next succeeds."""

    def parts() -> Iterator[bytes]:
        yield _NEW
        raise OSError(errno.EIO, "a part cannot be read")

    files = open()
    _expect_error(OSError, "create", lambda: files.create(f"{folder}/a/b", parts()))
    visible = [name for name in open().names(f"{folder}/a") if not name.startswith(".")]
    _expect("names of the folder", [], visible)
    files.create(f"{folder}/a/b", [_OLD])
    _expect("read() of the next one", _OLD, open().read(f"{folder}/a/b"))


def put_replaces_if_asked(open: Open, folder: str) -> None:
    """`put` copies a local file; it replaces an existing file only with `overwrite=True`."""
    files, path = open(), f"{folder}/a/b"
    with tempfile.TemporaryDirectory(prefix="keras_distplug-") as here:
        long, short, empty = (Path(here, name) for name in ("long", "short", "empty"))
        for source, content in ((long, _NEW), (short, _OLD), (empty, b"")):
            source.write_bytes(content)
        files.put(long, path, overwrite=False)
        _expect("read()", _NEW, files.read(path))
        _expect_error(FileExistsError, "put", lambda: files.put(short, path, overwrite=False))
        _expect("read() after a refused `put`", _NEW, open().read(path))
        for source in (short, empty, long):
            files.put(source, path, overwrite=True)
            for each in (files, open()):
                _expect("read() after overwriting", source.read_bytes(), each.read(path))
                _expect("size() after overwriting", source.stat().st_size, each.size(path))
        files.put(short, f"{folder}/a/new", overwrite=True)
        long.write_bytes(b"changed")
    _expect("read() after the local file has changed", _NEW, open().read(path))
    _expect("names of the folder", ["b", "new"], open().names(f"{folder}/a"))


def half_a_replacement_is_never_seen(open: Open, folder: str) -> None:
    """While `put` replaces a file, it has either all of its old content or all of the new."""
    contents = {letter * 2**20 for letter in (b"a", b"b")}
    with tempfile.TemporaryDirectory(prefix="keras_distplug-") as here:
        sources = [Path(here, name) for name in ("a", "b")]
        for source, content in zip(sources, sorted(contents), strict=True):
            source.write_bytes(content)

        def replace() -> None:
            files = open()
            for source in sources * 4:
                files.put(source, f"{folder}/a", overwrite=True)

        seen = _read_during(open, folder, replace)
    _expect("contents read that were never put", set(), seen - contents)


def copies_are_files(open: Open, folder: str) -> None:
    """`copy` makes a file that outlives its source and replaces no other, or raises OSError."""
    files = open()
    files.create(f"{folder}/a/b", [_NEW])
    files.create(f"{folder}/a/other", [_OLD])
    try:
        files.copy(f"{folder}/a/b", f"{folder}/c/d")
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:  # a store without such an operation
        _expect("names of the folder", [], open().names(f"{folder}/c"))
        return
    _expect_error(FileExistsError, "copy", lambda: files.copy(f"{folder}/a/other", f"{folder}/c/d"))
    _expect_error(OSError, "copy", lambda: files.copy(f"{folder}/a/none", f"{folder}/c/e"))
    files.delete(f"{folder}/a")
    _expect("read()", _NEW, open().read(f"{folder}/c/d"))
    _expect("names of the folder", ["d"], open().names(f"{folder}/c"))


def ranges_can_be_read(open: Open, folder: str) -> None:
    """`read_into` fills a buffer with bytes from an offset, up to the end of the file."""
    open().create(f"{folder}/a", [_NEW])
    size = len(_NEW)
    for offset, asked in ((0, 100), (1000, 1), (size - 300, 300), (size - 300, 5000), (7, size)):
        buffer = bytearray(b"-" * asked)
        content = _NEW[offset : offset + asked]
        count = open().read_into(f"{folder}/a", offset, memoryview(buffer))
        _expect(f"read_into({offset=}) of {asked} bytes", len(content), count)
        _expect(f"the buffer of read_into({offset=})", content, bytes(buffer[:count]))
    for offset in (size, 10 * size):
        count = open().read_into(f"{folder}/a", offset, memoryview(bytearray(10)))
        _expect(f"read_into({offset=}) at the end of the file", 0, count)


def missing_files_are_reported(open: Open, folder: str) -> None:
    """`read`, `read_into` and `size` raise FileNotFoundError if the file does not exist."""
    files = open()
    files.create(f"{folder}/a/b", [_OLD])
    for path in (f"{folder}/a/none", f"{folder}/none/b"):
        _expect_error(FileNotFoundError, "read", functools.partial(files.read, path))
        _expect_error(FileNotFoundError, "size", functools.partial(files.size, path))
        buffer = memoryview(bytearray(10))
        _expect_error(
            FileNotFoundError, "read_into", functools.partial(files.read_into, path, 0, buffer)
        )


def names_are_listed(open: Open, folder: str) -> None:
    """`names` lists a folder's files and subfolders, sorted; nothing if it is not a folder."""
    files = open()
    for path in ("b", "a/x/y", "ab", "C"):
        files.create(f"{folder}/{path}", [_OLD])
    _expect("names of the folder", ["C", "a", "ab", "b"], files.names(folder))
    _expect("names of a subfolder", ["x"], files.names(f"{folder}/a"))
    _expect("the new folder is in names()", True, folder.partition("/")[0] in files.names())
    for path in ("b", "none", "none/at/all"):
        _expect(f"names({path!r})", [], files.names(f"{folder}/{path}"))


def changes_of_others_are_seen(open: Open, folder: str) -> None:
    """Files that one process creates or deletes appear in other listings immediately."""
    mine, other = open(), open()
    for count in range(3):
        _expect("names of the folder", count, len(mine.names(folder)))
        other.create(f"{folder}/{count}", [_OLD])
    other.delete(f"{folder}/1")
    _expect("names of the folder after a deletion", ["0", "2"], mine.names(folder))


def deleted_files_are_gone(open: Open, folder: str) -> None:
    """`delete` deletes a file, or a folder with its contents, and nothing else; the names can be
    used again. It does nothing if the path does not exist."""
    files = open()
    for path in ("a/b/c", "a/b/d/e", "a/bc", "f"):
        files.create(f"{folder}/{path}", [_OLD])
    for path in ("a/b", "f", "f", "none", "none/at/all"):
        files.delete(f"{folder}/{path}")
    _expect("names of the deleted folder", [], files.names(f"{folder}/a/b"))
    _expect("names of its parent", ["bc"], open().names(f"{folder}/a"))
    _expect("names of the folder", ["a"], open().names(folder))
    _expect("read() of a file with a similar name", _OLD, open().read(f"{folder}/a/bc"))
    _expect_error(FileNotFoundError, "read", lambda: files.read(f"{folder}/f"))
    files.create(f"{folder}/f", [_NEW])
    _expect("size() of a new file of this name", len(_NEW), files.size(f"{folder}/f"))


def full_folders_stay(open: Open, folder: str) -> None:
    """`delete_if_empty` does nothing to a folder that is not empty."""
    open().create(f"{folder}/a", [_OLD])
    open().delete_if_empty()
    _expect("read()", _OLD, open().read(f"{folder}/a"))


def any_name_is_possible(open: Open, folder: str) -> None:
    """Names may contain spaces, dots, dashes and letters of any language."""
    files, names = open(), sorted(["with space", "a-b_c.1.bin", "ä", "名前", ".hidden"])
    for name in names:
        files.create(f"{folder}/{name}/{name}", [name.encode()])
    _expect("names of the folder", names, open().names(folder))
    for name in names:
        _expect(f"names({name!r})", [name], open().names(f"{folder}/{name}"))
        content = open().read(f"{folder}/{name}/{name}")
        _expect(f"read({name!r})", name.encode(), content)
    files.delete(f"{folder}/with space")
    _expect("names of the folder", sorted({*names} - {"with space"}), open().names(folder))


def threads_share_files(open: Open, folder: str) -> None:
    """Several threads may use one object at the same time."""
    files, barrier = open(), threading.Barrier(_WRITERS)

    def one(index: int) -> bytes:
        barrier.wait(60)
        files.create(f"{folder}/{index}/file", [bytes([index]) * 50_000])
        return files.read(f"{folder}/{index}/file")

    with ThreadPoolExecutor(_WRITERS) as pool:
        found = list(pool.map(one, range(_WRITERS)))
    _expect("contents", [bytes([index]) * 50_000 for index in range(_WRITERS)], found)


def places_have_names(open: Open, folder: str) -> None:
    """`where` returns the folder's name; with a path, the name followed by `/` and the path."""
    files = open()
    if not (isinstance(files.where(), str) and files.where()):
        raise AssertionError(f"Expected where() to return a name. Received: {files.where()!r}.")
    _expect("where(path)", f"{files.where()}/{folder}", files.where(folder))


def traits_are_usable(open: Open, folder: str) -> None:
    """`traits` has `file_bytes` and `at_once` of at least 1, and a boolean `is_near`."""
    traits = open().traits
    for name in ("file_bytes", "at_once"):
        value = getattr(traits, name)
        if not (isinstance(value, int) and value > 0):
            raise AssertionError(f"Expected {name} to be an int > 0. Received: {value!r}.")
    _expect("the type of is_near", bool, type(traits.is_near))


PROMISES: tuple[Check, ...] = (
    created_files_are_whole,
    create_replaces_nothing,
    one_writer_wins,
    half_a_file_is_never_seen,
    failed_files_do_not_exist,
    put_replaces_if_asked,
    half_a_replacement_is_never_seen,
    copies_are_files,
    ranges_can_be_read,
    missing_files_are_reported,
    names_are_listed,
    changes_of_others_are_seen,
    deleted_files_are_gone,
    full_folders_stay,
    any_name_is_possible,
    threads_share_files,
    places_have_names,
    traits_are_usable,
)


def _expect(what: str, expected: object, received: object) -> None:
    if received != expected:
        raise AssertionError(
            f"Expected {what}: {reprlib.repr(expected)}. Received: {reprlib.repr(received)}."
        )


def _expect_error(kind: type[Exception], what: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except kind:
        return
    except Exception as error:
        raise AssertionError(
            f"Expected {what}() to raise {kind.__name__}. Received: {error!r}."
        ) from error
    raise AssertionError(f"Expected {what}() to raise {kind.__name__}. Received: no error.")


def _read_during(open: Open, folder: str, action: Callable[[], None]) -> set[bytes]:
    """Returns all contents of the file `a` that another object reads while `action` runs."""
    reader, seen = open(), set[bytes]()
    with ThreadPoolExecutor(1) as pool:
        action_in_thread = pool.submit(action)
        while not action_in_thread.done():
            if "a" in reader.names(folder):
                seen.add(reader.read(f"{folder}/a"))
            time.sleep(_SECS / 2)
        action_in_thread.result()
    return seen | {reader.read(f"{folder}/a")}
