"""Prints the output of all workers line by line, prefixed with the worker's name."""

from __future__ import annotations

import codecs
import datetime
import os
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Self, TextIO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")

# CSI and OSC sequences, and short ones. _CUT_OFF matches a sequence that the end of the data cuts
# off.
_ESCAPE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])"
_CUT_OFF = r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,4096}\x1b?|[ -/]*)\Z"
_UNPRINTABLE = re.compile(rf"{_ESCAPE}|{_CUT_OFF}|[\x00-\x08\x0b-\x1f\x7f]")
_COLOUR_ESCAPE = re.compile(r"\x1b\[[0-9;:]*m")

_LONGEST_LINE = 1 << 20  # characters; longer lines are split, so that they cannot fill the memory
_PATIENCE_SECS = 2.0  # after which the supervisor's own lines are dropped if the output is blocked


@dataclass(frozen=True)
class Final:
    """A complete line."""

    line: str


@dataclass(frozen=True)
class Transient:
    """A line that may still be rewritten, such as a progress bar."""

    line: str


Event = Final | Transient


class LineAssembler:
    """Splits a worker's output into lines.

    A line that is rewritten with `\\r`, such as a progress bar, becomes a series of `Transient`s,
    and a `Final` with its last version. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = ""

    def feed(self, data: bytes) -> list[Event]:
        """Returns the lines that `data` completes, and the open line if `data` changed it."""
        return self._lines(self._decoder.decode(data))

    def close(self) -> list[Event]:
        """Returns the last line if it did not end with a newline."""
        events = self._lines(self._decoder.decode(b"", final=True))
        events = [event for event in events if isinstance(event, Final)]
        if self._open:
            events.append(Final(_last_version(self._open).rstrip(" ")))
            self._open = ""
        return events

    def _lines(self, text: str) -> list[Event]:
        *complete, self._open = (self._open + text).split("\n")
        # Programs that rewrite a line pad it with spaces to erase a longer previous version.
        events: list[Event] = [Final(_last_version(line).rstrip(" ")) for line in complete]
        line = _last_version(self._open)
        if len(line) > _LONGEST_LINE:
            events.append(Final(line))
            self._open = ""
        elif line:
            events.append(Transient(line))
            self._open = line + "\r" * self._open.endswith("\r")
        return events


def _last_version(line: str) -> str:
    """Returns the text that a terminal would show of a rewritten line."""
    # Before its `\r`, Keras prints a `\b` for every character.
    return line.replace("\b", "").rstrip("\r").rpartition("\r")[2]


class Output:
    """Prints the workers' lines and the supervisor's notes. A thread-safe context manager.

    On a terminal, the open line of the first worker, its progress bar, remains visible at the
    bottom.

    Args:
        workers: Names of all workers; their order determines the colours.
        file: File to print to. Defaults to `sys.stdout`.
    """

    def __init__(self, workers: Sequence[str], file: TextIO | None = None) -> None:
        self._file = cast(TextIO, _SteadyFile(file or sys.stdout))
        self._console = Console(file=self._file, highlight=False, markup=False, emoji=False)
        self._coloured = bool(self._console.color_system) and not self._console.no_color
        self._live_worker = workers[0]
        styles = [Style.parse(_COLOURS[place % len(_COLOURS)]) for place, _ in enumerate(workers)]
        self._prefixes = {
            name: Text(f"[{name}] ", style) for name, style in zip(workers, styles, strict=True)
        }
        self._rendered = {name: self._render(text) for name, text in self._prefixes.items()}
        self._lock = threading.Lock()
        # With FORCE_COLOR, rich treats a file as a terminal, but a file has no cursor.
        self._live = (
            Live(
                Group(),
                console=self._console,
                transient=True,
                refresh_per_second=10,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            if self._console.is_interactive and self._console.file.isatty()
            else None
        )

    def show(self, worker: str, event: Event) -> None:
        """Prints a line of `worker`. Empty lines are dropped."""
        is_live = self._live is not None and worker == self._live_worker
        if isinstance(event, Transient) and not is_live:
            return
        with self._lock:
            if isinstance(event, Transient):
                self._update(self._progress(worker, event.line))
                return
            if is_live:
                self._update(Group(), refresh=True)  # otherwise the old bar is drawn again
            if _UNPRINTABLE.sub("", event.line).strip():
                self._print(self._rendered[worker] + self._presentable(event.line))

    def note(self, text: str) -> None:
        """Prints a line of the supervisor, with the time; drops it if the output is blocked."""
        if self._lock.acquire(timeout=_PATIENCE_SECS):
            try:
                now = datetime.datetime.now(datetime.UTC)
                prefix = Text(f"[distplug {now:%H:%M:%SZ}] ", Style(bold=True))
                self._print(self._render(prefix) + text)
            finally:
                self._lock.release()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def _update(self, shown: RenderableType, refresh: bool = False) -> None:
        assert self._live is not None
        self._live.update(shown, refresh=refresh)

    def _render(self, text: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(text, end="")
        return captured.get()

    def _print(self, line: str) -> None:
        if self._live:
            # soft_wrap: rich neither wraps nor crops, so a long line remains one line in a log.
            self._console.print(_Verbatim(line), soft_wrap=True)
        else:
            self._file.write(f"{line}\n")
            self._file.flush()

    def _presentable(self, line: str) -> str:
        # Only colours may pass: moving the cursor would garble the lines of other workers.
        if not self._coloured:
            return _UNPRINTABLE.sub("", line)
        kept = _UNPRINTABLE.sub(
            lambda found: found[0] if _COLOUR_ESCAPE.fullmatch(found[0]) else "", line
        )
        return f"{kept}\x1b[0m" if "\x1b" in kept else kept

    def _progress(self, worker: str, line: str) -> Text:
        text = self._prefixes[worker] + Text.from_ansi(self._presentable(line))
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


@dataclass(frozen=True)
class _Verbatim:
    """A line printed verbatim: without markup, highlighting, or expansion of tabs."""

    line: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self.line)
        yield Segment.line()


class _SteadyFile:
    """A text file that discards its output, after one message, once writing fails.

    A full disk or a closed reader must not stop training: a worker blocks at its next `print` if
    its pipe is not read.

    It bypasses the file's buffer: a thread that is blocked there holds the buffer's lock, and an
    interpreter that cannot acquire the lock on exit aborts.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._failed = False
        try:
            self._descriptor: int | None = file.fileno()
        except OSError:  # a file in memory
            self._descriptor = None
        else:
            file.flush()

    def write(self, text: str) -> int:
        try:
            if self._descriptor is None:
                return self._file.write(text)
            left = text.encode(self._file.encoding, self._file.errors or "strict")
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:
        return self._file.encoding

    def _fail(self, error: OSError) -> None:
        already, self._failed = self._failed, True
        if isinstance(error, BrokenPipeError):
            _mute(self._file)
        if not already:
            try:
                print(
                    f"keras-distplug: the output cannot be written: {error}. Continuing without "
                    "output.",
                    file=sys.stderr,
                )
            except OSError:  # `2>&1 |` to a process that has exited
                _mute(sys.stderr)


def _mute(file: TextIO) -> None:
    """Redirects `file` to nowhere: its buffer would fail again at exit and change the code."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), file.fileno())


def pump(pipe: IO[bytes], worker: str, output: Output) -> None:
    """Shows the output from `pipe` until it is closed."""
    assembler = LineAssembler()
    with pipe:
        while data := os.read(pipe.fileno(), 65536):
            for event in assembler.feed(data):
                output.show(worker, event)
    for event in assembler.close():
        output.show(worker, event)
