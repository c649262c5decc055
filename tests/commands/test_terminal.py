"""Progress on a terminal, and completion with the Tab key."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import made
from storage.checkpoints import RUN
from support.cluster import environment

from keras_distplug.cli import main
from keras_distplug.commands import progress_bar
from keras_distplug.storage.files import is_object_store, open_files

COMMAND = [sys.executable, "-m", "keras_distplug"]


def on_terminal(*arguments: object) -> tuple[int, str, str]:
    """Runs a command whose standard error is a terminal; returns its code and both outputs."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment({"TERM": "xterm", "COLUMNS": "120"}),
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed, shown.decode()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("verify", "--deep"), r"verifying run-0001 .* of \S+ KB"),
        (("prune", "--keep-last", "1"), "pruning run-0001 .*4 of 4 deletions"),
        (("export", "x.safetensors"), r"exporting .*of \d+ B"),
        (("ls",), "reading training jobs .*1 of 1 training jobs"),
        (("goodput",), "reading logs"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_progress(arguments: tuple[str, ...], shown: str, tmp_path: Path) -> None:
    """Long operations show their progress on standard error, without affecting standard output."""
    training = tmp_path / "mnist"
    made.run(training, *(made.state(step) for step in (4, 8, 12)))
    (training / RUN / "log").mkdir()
    command, *options = arguments
    if command == "export":
        options = [str(tmp_path / "x.safetensors")]
    directory = tmp_path if command == "ls" else training
    code, printed, drawn = on_terminal(command, directory, *options)
    assert code == 0, drawn
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    assert re.search(shown, text), text
    assert "\x1b" not in printed
    assert printed


@pytest.mark.parametrize("command", [("verify", "--deep"), ("ls",)], ids=" ".join)
def test_no_progress_in_pipes(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal, standard error stays empty."""
    made.run(tmp_path, made.state(4))
    assert main([command[0], str(tmp_path), *command[1:]]) == 0
    assert capsys.readouterr().err == ""


def test_counting(directory: str) -> None:
    """Files that count are the same files, of the same kind."""
    files = open_files(directory)
    made.run(files, made.state(4))
    counted: list[float] = []
    same = progress_bar._counting(files, counted.append, counted.append)
    assert is_object_store(same) == is_object_store(files)
    assert same.names(RUN) == files.names(RUN)
    path = f"{RUN}/RUN.json"
    size = files.size(path)
    assert same.read_into(path, 0, memoryview(bytearray(size))) == size
    same.delete(path)
    assert counted == [size, 1]
    assert "RUN.json" not in files.names(RUN)


# Completion


def complete(line: str, folder: Path) -> list[str]:
    """Returns what the Tab key offers at the end of a line, as the script of bash asks for it."""
    answers = folder / "answers"
    with open(answers, "wb") as file:
        subprocess.run(
            ["bash", "-c", f"exec 8>&{file.fileno()} 9>/dev/null; exec {' '.join(COMMAND)}"],
            env=environment(
                {
                    "_ARGCOMPLETE": "3",  # `python -m keras_distplug` is three words
                    "_ARGCOMPLETE_IFS": "\n",
                    "COMP_LINE": f"python -m {line}",
                    "COMP_POINT": str(len(f"python -m {line}")),
                }
            ),
            cwd=folder,
            pass_fds=[file.fileno()],
            capture_output=True,
            timeout=60,
            check=False,
        )
    return answers.read_text().split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("keras-distplug ver", ["verify"]),
        ("keras-distplug verify --de", ["--deep"]),
        ("keras-distplug ls runs --run ", [RUN]),
        ("keras-distplug show runs step", ["step-00000004", "step-00000008"]),
        (
            "keras-distplug export runs x.keras --step ",
            ["step-00000004", "step-00000008"],
        ),
        ("keras-distplug ls ru", ["runs/"]),
    ],
)
def test_completion(line: str, expected: list[str], tmp_path: Path) -> None:
    """Commands, options, paths, runs and checkpoints are completed."""
    pytest.importorskip("argcomplete")
    made.run(tmp_path / "runs", made.state(4), made.state(8))
    assert complete(line, tmp_path) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_for_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script for every shell completes `keras-distplug`."""
    pytest.importorskip("argcomplete")
    assert main(["completion", shell]) == 0
    assert "keras-distplug" in capsys.readouterr().out


def test_without_argcomplete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the optional package, the error says what to install."""
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install argcomplete" in capsys.readouterr().err
