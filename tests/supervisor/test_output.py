from __future__ import annotations

import contextlib
import errno
import io
import os
import pty
import re
import threading

import pytest

from keras_distplug.supervisor.output import Final, LineAssembler, Output, Transient

# Output of Keras 3.15's Progbar(2) with width 4 to a pipe.
KERAS_BAR = (
    b"Epoch 1/1\n"
    b"\r\x1b[1m1/2\x1b[0m \x1b[32m\xe2\x94\x81\xe2\x94\x81\x1b[0m\x1b[37m\xe2\x94\x81\xe2\x94\x81"
    b"\x1b[0m \x1b[1m0s\x1b[0m 50ms/step - loss: 1.0000"
    + b"\x08"
    * 38
    + b"\r\x1b[1m2/2\x1b[0m \x1b[32m\xe2\x94\x81\xe2\x94\x81\xe2\x94\x81\xe2\x94\x81\x1b[0m\x1b[37m"
    b"\x1b[0m \x1b[1m0s\x1b[0m 5ms/step - loss: 0.5000  \n"
)
KERAS_FINAL = (
    "\x1b[1m2/2\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m0s\x1b[0m 5ms/step - loss: 0.5000"
)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def finals(*chunks: bytes) -> list[str]:
    assembler = LineAssembler()
    events = [event for chunk in chunks for event in assembler.feed(chunk)] + assembler.close()
    return [event.line for event in events if isinstance(event, Final)]


def printed(*lines: str) -> str:
    file = io.StringIO()
    with Output(["worker-0", "worker-1"], file) as output:
        for line in lines:
            output.show("worker-1", Final(line))
    return file.getvalue()


def test_lines_across_reads() -> None:
    """A line is complete at its newline, however the data is split."""
    assembler = LineAssembler()
    assert assembler.feed(b"one\ntw") == [Final("one"), Transient("tw")]
    assert assembler.feed(b"o\n") == [Final("two")]


def test_last_line_without_newline() -> None:
    """A worker's last output is shown even if it died before the newline."""
    assert finals(b"one\ntwo") == ["one", "two"]


def test_keras_progress_bar() -> None:
    """A Keras progress bar becomes one final line; its updates are transient."""
    events = LineAssembler().feed(KERAS_BAR)
    assert events == [Final("Epoch 1/1"), Final(KERAS_FINAL)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_any_split(size: int) -> None:
    """Splits within UTF-8 characters and escape sequences make no difference."""
    chunks = [KERAS_BAR[at : at + size] for at in range(0, len(KERAS_BAR), size)]
    assert finals(*chunks) == ["Epoch 1/1", KERAS_FINAL]


def test_progress_is_transient() -> None:
    """An incomplete progress bar is shown as it is."""
    first_update = KERAS_BAR[: KERAS_BAR.index(b"\x08")]
    last = LineAssembler().feed(first_update)[-1]
    assert isinstance(last, Transient)
    assert last.line.endswith("50ms/step - loss: 1.0000")


@pytest.mark.parametrize(
    ("written", "line"),
    [
        (b"hello\rby\n", "by"),
        (b"100%\b\b\b\b\r200%\n", "200%"),
        (b"line\r\n", "line"),
        (b"100%\r    \r", ""),
        (b"\xff[bold]\n", "\ufffd[bold]"),
    ],
)
def test_rewriting(written: bytes, line: str) -> None:
    """The last version of a line counts; bytes that are not UTF-8 are replaced."""
    assert finals(written) in ([line], [] if not line else None)


def test_line_without_end() -> None:
    """A line without an end is split, and no part of it is lost."""
    assembler = LineAssembler()
    events = [event for _ in range(40) for event in assembler.feed(b"x" * 65536)]
    lines = [event.line for event in [*events, *assembler.close()] if isinstance(event, Final)]
    assert 2 <= len(lines) <= 3
    assert "".join(lines) == "x" * 40 * 65536


def test_prefix_and_markup() -> None:
    """Every line has its worker's prefix, and brackets in it are not markup."""
    assert printed("[bold]x[/bold] :smile: 12\t3") == "[worker-1] [bold]x[/bold] :smile: 12\t3\n"


def test_long_lines() -> None:
    """A long line remains one line."""
    line = "word " * 20_000 + "end"
    assert printed(line) == f"[worker-1] {line}\n"


def test_empty_lines() -> None:
    """Lines without visible characters are dropped."""
    assert printed("", "  ", "\x1b[0m", "x") == "[worker-1] x\n"


def test_no_escape_codes_in_a_file() -> None:
    """If the output is not a terminal, colours and cursor movements are removed."""
    text = printed("\x1b[31mred\x1b[0m \x1b[2K\x1b[1Agone\x1b]0;title\x07\x1b7\a.")
    assert text == "[worker-1] red gone.\n"


def test_force_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR keeps the colours in a file, but never the cursor movements."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = printed("\x1b[31mred\x1b[2K")
    assert "\x1b[31mred\x1b[0m\n" in text
    assert "\x1b[35m[worker-1] " in text


def test_no_transient_lines_in_a_file() -> None:
    """If the output is not a terminal, only complete lines are printed, and only once."""
    file = io.StringIO()
    with Output(["worker-0"], file) as output:
        assembler = LineAssembler()
        for at in range(len(KERAS_BAR)):
            for event in assembler.feed(KERAS_BAR[at : at + 1]):
                output.show("worker-0", event)
    assert file.getvalue().splitlines() == [
        "[worker-0] Epoch 1/1",
        "[worker-0] 2/2 ━━━━ 0s 5ms/step - loss: 0.5000",
    ]


def on_terminal(*shown: tuple[str, Final | Transient]) -> str:
    """Returns everything that a terminal receives; finally, the last progress bar is erased."""
    ours, theirs = pty.openpty()
    received: list[bytes] = []

    def receive() -> None:
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(ours, 65536):
                received.append(data)

    reader = threading.Thread(target=receive, daemon=True)
    reader.start()
    with (
        os.fdopen(theirs, "w", encoding="utf-8") as file,
        Output(["worker-0", "worker-1"], file) as output,
    ):
        for worker, event in shown:
            output.show(worker, event)
    reader.join(10)
    assert not reader.is_alive()
    os.close(ours)
    return b"".join(received).decode()


def test_progress_on_a_terminal() -> None:
    """On a terminal, the chief's open line is redrawn below every printed line."""
    text = on_terminal(("worker-0", Transient("1/2 bar")), ("worker-1", Final("hello")))
    assert text.index("hello") < text.rindex("1/2 bar")


def test_complete_bar_on_a_terminal() -> None:
    """The complete bar replaces the open one."""
    text = on_terminal(("worker-0", Transient("1/2 bar")), ("worker-0", Final("2/2 bar")))
    assert text.count("2/2 bar") == 1
    assert "1/2 bar" not in text[text.index("2/2 bar") :]


def test_progress_of_other_workers_on_a_terminal() -> None:
    """Only the chief's open line is shown live."""
    text = on_terminal(("worker-1", Transient("1/2 bar")), ("worker-1", Final("hello")))
    assert "hello" in text
    assert "1/2" not in text


def test_no_color_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR removes the colours from the workers' output on a terminal."""
    line = ("worker-1", Final("\x1b[31mred"))
    coloured = on_terminal(line)
    assert "\x1b[31mred\x1b[0m" in coloured
    assert "\x1b[35m[worker-1]" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = on_terminal(line)
    assert "[worker-1] red" in plain
    assert not {"\x1b[31m", "\x1b[35m"} & set(re.findall(r"\x1b\[\d+m", plain))


class FullDisk(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lost_output(capsys: pytest.CaptureFixture[str]) -> None:
    """If output cannot be written, work continues; this is reported once, and nothing is
    repeated."""
    file = FullDisk()
    with Output(["worker-0"], file) as output:
        output.show("worker-0", Final("lost"))
        output.note("lost")
        file.write = lambda text: io.StringIO.write(file, text)  # type: ignore[method-assign]
        output.show("worker-0", Final("seen"))
    assert file.getvalue() == "[worker-0] seen\n"
    assert capsys.readouterr().err.count("the output cannot be written: [Errno 28]") == 1
