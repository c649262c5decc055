"""What the workers print, made readable: one line at a time, and each says whose it is."""

from __future__ import annotations

import codecs
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self, TextIO, cast

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")

# CSI and OSC sequences, and the short ones; the last alternative is a sequence cut off by the end
# of what was read.
_ESCAPE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])"
_CUT_OFF = r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,4096}\x1b?|[ -/]*)\Z"
_TOKEN = re.compile(rf"({_CUT_OFF})|({_ESCAPE})|([\r\n\b])|([^\r\n\b\x1b]+|\x1b)")
_UNPRINTABLE = re.compile(rf"{_ESCAPE}|{_CUT_OFF}|[\x00-\x08\x0b-\x1f\x7f]")
_COLOUR_ESCAPE = re.compile(r"\x1b\[[0-9;:]*m")


@dataclass(frozen=True)
class Final:
    """A line that is complete."""

    line: str


@dataclass(frozen=True)
class Transient:
    """A line that is still being rewritten, such as a progress bar."""

    line: str


Event = Final | Transient


class LineAssembler:
    """Turns the bytes that a worker writes into lines, as a terminal would.

    `\\r` and `\\b` move back and what follows overwrites, so that a progress bar becomes a series
    of `Transient`s and one `Final`. Escape sequences are kept and take no room. Bytes that are
    not UTF-8 become U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._cut_off = ""
        self._cells: list[str] = []  # one printed character each, after its escape sequences
        self._cursor = 0
        self._escapes = ""
        self._rewritten = False

    def feed(self, data: bytes) -> list[Event]:
        """The lines that `data` completes, and the one that it leaves open if it touched it."""
        return list(self._assemble(self._cut_off + self._decoder.decode(data)))

    def close(self) -> list[Event]:
        """The last line, if it did not end with a newline."""
        rest = self._cut_off + self._decoder.decode(b"", final=True)
        events = [event for event in self._assemble(rest) if isinstance(event, Final)]
        return [*events, Final(self._take())] if self._cells else [*events]

    def _assemble(self, text: str) -> Iterator[Event]:
        self._cut_off = ""
        open_line_touched = False
        for cut_off, escape, control, printed in _TOKEN.findall(text):
            open_line_touched = control != "\n"
            if cut_off:
                self._cut_off = cut_off
            elif escape:
                self._escapes += escape
            elif control == "\n":
                yield Final(self._take())
            elif control == "\r":
                self._move_to(0)
            elif control == "\b":
                self._move_to(max(0, self._cursor - 1))
            else:
                self._print(printed)
        if open_line_touched and self._cells:
            yield Transient(self._line())

    def _print(self, text: str) -> None:
        characters = list(text)
        characters[0] = self._escapes + characters[0]
        self._escapes = ""
        end = self._cursor + len(characters)
        self._cells[self._cursor : end] = characters
        self._cursor = end

    def _move_to(self, cursor: int) -> None:
        if self._escapes and self._cursor:
            # Such as the "reset" behind the last character: it belongs to what stands there.
            self._cells[self._cursor - 1] += self._escapes
        self._escapes = ""
        self._cursor = cursor
        self._rewritten = True

    def _line(self) -> str:
        line = "".join(self._cells) + self._escapes
        # Whoever rewrites a line pads it with spaces to wipe out what stood there.
        return line.rstrip(" ") if self._rewritten else line

    def _take(self) -> str:
        line = self._line()
        self._cells, self._cursor, self._escapes, self._rewritten = [], 0, "", False
        return line


class Output:
    """Prints the workers' lines and the supervisor's own notes; safe from several threads.

    On a terminal the open line of `live_worker` stays visible at the bottom. A context manager.

    Args:
        workers: All names, which fixes their colours.
        live_worker: The one whose progress bar is shown; usually the chief.
        file: Where to print; `sys.stdout` by default.
    """

    def __init__(
        self, workers: Iterable[str], live_worker: str, file: TextIO | None = None
    ) -> None:
        self._styles = {
            name: Style.parse(_COLOURS[place % len(_COLOURS)]) for place, name in enumerate(workers)
        }
        self._live_worker = live_worker
        steady = cast(TextIO, _SteadyFile(file or sys.stdout))
        self._console = Console(file=steady, highlight=False, markup=False, emoji=False)
        self._coloured = bool(self._console.color_system) and not self._console.no_color
        self._lock = threading.Lock()
        # FORCE_COLOR makes rich take a file for a terminal; nothing can move there.
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
        with self._lock:
            if isinstance(event, Transient):
                if self._live and worker == self._live_worker:
                    self._live.update(self._progress(worker, event.line))
                return
            if self._live and worker == self._live_worker:
                self._live.update(Group())
            if _UNPRINTABLE.sub("", event.line).strip():
                self._print(f"[{worker}] ", self._styles[worker], self._presentable(event.line))

    def note(self, text: str) -> None:
        """Prints a line of the supervisor's own."""
        with self._lock:
            self._print("[distplug] ", Style(bold=True), text)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def _print(self, prefix: str, style: Style, line: str) -> None:
        # soft_wrap: rich neither wraps nor crops, so a long line stays one line in a log.
        self._console.print(_Verbatim(prefix, style, line), soft_wrap=True)

    def _presentable(self, line: str) -> str:
        # Only colours may pass: a sequence that moves the cursor would break the lines of others.
        if not self._coloured:
            return _UNPRINTABLE.sub("", line)
        kept = _UNPRINTABLE.sub(
            lambda found: found[0] if _COLOUR_ESCAPE.fullmatch(found[0]) else "", line
        )
        return f"{kept}\x1b[0m" if "\x1b" in kept else kept

    def _progress(self, worker: str, line: str) -> Text:
        prefix = Text(f"[{worker}] ", style=self._styles[worker])
        text = prefix + Text.from_ansi(self._presentable(line))
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


@dataclass(frozen=True)
class _Verbatim:
    """A line that reaches the terminal as it is: no markup, no tabs expanded, no highlighting."""

    prefix: str
    style: Style
    line: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self.prefix, self.style)
        yield Segment(self.line)
        yield Segment.line()


class _SteadyFile:
    """A text file that goes on without output when it can take no more, and says so once.

    A full disk or a reader that is gone must not end the training: a worker whose pipe nobody
    reads stops at its next `print`.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._failed = False

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
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
        if not self._failed:
            print(
                f"keras-distplug: the output cannot be written: {error}. Going on without.",
                file=sys.stderr,
            )
        self._failed = True
        if isinstance(error, BrokenPipeError):
            # What the file holds back would fail again at exit and change the exit code.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())


def pump(pipe: IO[bytes], worker: str, output: Output) -> None:
    """Shows everything that comes out of `pipe`, until it closes."""
    assembler = LineAssembler()
    with pipe:
        while data := os.read(pipe.fileno(), 65536):
            for event in assembler.feed(data):
                output.show(worker, event)
    for event in assembler.close():
        output.show(worker, event)
