"""Shows the progress of a command that takes long: on a terminal only, and on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from keras_distplug.commands import tables
from keras_distplug.core.printable import printable
from keras_distplug.storage.files import Files, is_object_store


class Bar:
    """A line with a bar, below what the command prints. Without a terminal, it does nothing.

    Args:
        progress: What draws the line. `None` draws nothing.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._printed = False

    @property
    def is_shown(self) -> bool:
        """True on a terminal: only then is it worth computing totals."""
        return self._progress is not None

    def start(self, what: str, total: float | None = None, unit: str = "") -> None:
        """Replaces the line.

        Args:
            what: The work in progress, such as `"verifying run-0001"`.
            total: The amount of work. Defaults to `None`: not known.
            unit: `"bytes"`, or a plural noun. Defaults to `""`: amounts are not shown.
        """
        if self._progress is None:
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(printable(what), total=total, unit=unit)

    def add(self, amount: float) -> None:
        """Adds to the work done. From any thread."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, amount)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Removes the line while the body prints to standard output, the same terminal."""
        if self._progress is None:
            yield
            return
        self._progress.stop()
        try:
            yield
        finally:
            sys.stdout.flush()
            self._progress.start()

    def counting(self, files: Files) -> Files:
        """Returns the same files; every byte read from them is added to the work done."""
        return files if self._progress is None else _counting(files, self.add, None)

    def counting_deletions(self, files: Files) -> Files:
        """Returns the same files; every deletion is added to the work done."""
        return files if self._progress is None else _counting(files, None, self.add)


@contextlib.contextmanager
def bar() -> Iterator[Bar]:
    """Shows the progress of the body if standard error is a terminal."""
    console = Console(stderr=True, highlight=False, markup=False)
    if not (sys.stderr.isatty() and console.is_interactive):
        yield Bar(None)
        return
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        _AmountColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with progress:
        yield Bar(progress)


class _AmountColumn(ProgressColumn):
    """`"312 MB of 1.2 GB"`, or `"3 of 12 deleted"`."""

    def render(self, task: Any) -> Any:
        from rich.text import Text

        unit = task.fields.get("unit", "")
        if not unit:
            return Text("")
        is_bytes = unit == "bytes"
        shown: Callable[[float], str] = tables.size if is_bytes else lambda count: f"{count:.0f}"
        text = shown(task.completed)
        if task.total is not None:
            text += f" of {shown(task.total)}"
        return Text(text if is_bytes else f"{text} {unit}")


class _Counting:
    """Files that count reads and deletions."""

    def __init__(
        self,
        files: Files,
        read: Callable[[float], None] | None,
        deleted: Callable[[float], None] | None,
    ) -> None:
        self._files = files
        self._read = read
        self._deleted = deleted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        count = self._files.read_into(path, offset, buffer)
        if self._read is not None:
            self._read(count)
        return count

    def delete(self, path: str) -> None:
        self._files.delete(path)
        if self._deleted is not None:
            self._deleted(1)


class _CountingObjects(_Counting):
    """The same for an object store, which is recognized by the methods of its class."""

    def names_below(self, folder: str) -> list[str]:
        return self.__getattr__("names_below")(folder)  # type: ignore[no-any-return]

    def delete_file(self, path: str) -> None:
        self.__getattr__("delete_file")(path)
        if self._deleted is not None:
            self._deleted(1)


def _counting(
    files: Files,
    read: Callable[[float], None] | None,
    deleted: Callable[[float], None] | None,
) -> Files:
    kind = _CountingObjects if is_object_store(files) else _Counting
    return cast(Files, kind(files, read, deleted))
