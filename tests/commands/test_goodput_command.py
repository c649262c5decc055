"""`keras-distplug goodput`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from keras_distplug.cli import main
from keras_distplug.core import events
from keras_distplug.core.event_lines import to_line
from keras_distplug.core.events import SUPERVISOR, Entry, Event


def write(folder: Path, stem: str, *entries: tuple[float, Event]) -> None:
    (folder / "log").mkdir(parents=True, exist_ok=True)
    source = SUPERVISOR if stem.startswith(SUPERVISOR) else "worker-0"
    lines = [to_line(Entry(at, source, event, "job", 0)) for at, event in entries]
    (folder / "log" / f"{stem}.jsonl").write_bytes(b"".join(lines))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    at = time.time() - 100
    began = events.Began("a", 0, 1, 1, "host", 1, "Strategy", 9, 0)
    windows = [
        (at + 10, events.Window(0, 0, 0, {"start_up": 9.0})),
        (at + 60, events.Window(500, 500, 0, {"step": 40.0, "input": 8.0, "save": 2.0})),
    ]
    run = tmp_path / "run-0001"
    write(run, "one", (at + 10, began), *windows, (at + 60, events.Finished(500, 9, False)))
    started = (at, events.Started(("worker-0",), (0,)))
    write(run, "supervisor-job", started, (at + 64, events.Ended(0, "")))
    (tmp_path / "run-0002").mkdir()
    return tmp_path


def test_goodput(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The share, where the rest went, and the outcome of every attempt."""
    assert main(["goodput", str(directory)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "run-0001: goodput 62.5 % of 1 min 04 s, 66.7 % in the last 1 min; step 500, 1 attempt\n"
    )
    rows = {line.split()[0]: line.split()[1:4] for line in printed.splitlines() if line.strip()}
    assert rows["step"] == ["40.0", "62.5", "%"]
    assert rows["start_up"] == ["10.0", "15.6", "%"]
    assert rows["other"] == ["4.0", "6.2", "%"]
    assert "restore" not in rows
    assert rows["1"][-1]
    assert "finished" in printed


def test_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The seconds sum to the wall time."""
    assert main(["goodput", str(directory), "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert sum(run["secs"].values()) == pytest.approx(run["wall_secs"]) == pytest.approx(64)
    assert run["goodput"] == pytest.approx(0.625)
    assert [each["end"] for each in run["attempts"]] == ["finished"]
    assert run["workers"]["0"] == run["secs"]


@pytest.mark.parametrize(("step", "lost"), [(500, "not known"), (490, "at least 10")])
def test_lost_steps(
    step: int, lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a kill without a supervisor, nothing is claimed that the log does not know."""
    for session, begin, first in (("a", 1000.0, 0), ("b", 2000.0, step)):
        began = events.Began(session, 0, 1, 1, "host", 1, "Strategy", 9, first)
        steps = events.Window(first + 500, 500, 0, {"step": 40.0})
        write(tmp_path / "run-0001", session, (begin, began), (begin + 60, steps))
    assert main(["goodput", str(tmp_path)]) == 0
    first_attempt = capsys.readouterr().out.splitlines()[-2]
    assert f"0 to 500 {lost}" in " ".join(first_attempt.split())


def test_unknown_waits(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times of which an unknown part was waiting are reported."""
    at = time.time() - 20
    began = events.Began("b", 0, 1, 2, "host", 1, "Strategy", 9, 500)
    steps = [
        (at + 1, events.Window(510, 10, 0, {"step": 1.0}, 0.1)),
        (at + 3, events.Window(530, 20, 0, {"step": 2.0}, 0.1, 0.0)),
        (at + 4, events.Window(531, 1, 0, {"start_up": 1.0})),
    ]
    write(directory / "run-0001", "two", (at, began), *steps)
    assert main(["goodput", str(directory)]) == 0
    printed = capsys.readouterr().out
    assert (
        "Steps that took 1.0 s in total include an unknown amount of time waiting for data, "
        in printed
    )
    assert (
        "Steps that took 3.0 s in total include an unknown amount of time waiting for other "
        "replicas, " in printed
    )
    assert main(["goodput", str(directory), "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert run["unknown_waits_secs"] == {"input": 1.0, "sync": 3.0}


@pytest.mark.parametrize("arguments", [["--run", "run-0002"], ["--run", "run-0003"]])
def test_missing_log(
    arguments: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing log is reported, with the callback that writes it."""
    assert main(["goodput", str(directory), *arguments]) == 3
    assert "There is no log in" in capsys.readouterr().err
