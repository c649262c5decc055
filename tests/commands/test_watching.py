"""`keras-distplug watch`, and the names of reports: text, exit codes, and waiting."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import logged

from keras_distplug.cli import main
from keras_distplug.commands import watch
from keras_distplug.commands.arguments import NOTHING_THERE
from keras_distplug.core.event_lines import to_line
from keras_distplug.core.events import Entry
from keras_distplug.runlog.run_state import State


def put(folder: Path, stem: str, entries: Any) -> None:
    log = folder / "run-0001" / "log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{stem}.jsonl").write_bytes(b"".join(map(to_line, entries)))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of two attempts that has finished."""
    fits, supervised, _ = logged.fits(2, 10)
    put(tmp_path / "mnist", "supervisor-job", supervised)
    for number, fit in enumerate(fits):
        put(tmp_path / "mnist", str(number), fit.entries)
    return tmp_path / "mnist"


def first_attempt(folder: Path) -> float:
    """Leaves one worker's first attempt, and returns the time of its last entry."""
    fits, _, _ = logged.fits(1, 10)
    entries = [Entry(each.at, each.source, each.event) for each in fits[0].entries]
    put(folder, "0", entries)
    return entries[-1].at


def at(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    clock = SimpleNamespace(time=lambda: now, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(watch, "time", clock)


def test_first_screen(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state, the answers, and the incidents with what to do."""
    assert main(["watch", str(runs)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("✓ FINISHED  all 9 epochs are trained\nlast heard ")
    for name in ("worker", "since", "lost", "checkpoint safe", "recovers on its own", "slow"):
        assert f"\n{name} " in text
    assert "\nnext                 Nothing to do." in text
    assert re.search(r"^speed +[\d.]+ steps/s, when it last trained *$", text, re.MULTILINE)
    assert re.search(r"^worker +none stands out *$", text, re.MULTILINE)
    assert "NaN in `dense/kernel`, replica 1 [worker-1 on node-1]" in text
    assert f"keras-distplug replay {runs}" in text


@pytest.mark.parametrize(
    ("after", "code", "options"),
    [
        (1.0, 10, ["--once"]),
        (20.0, 12, ["--once"]),
        (20.0, 0, ["--until", "silent"]),
        (20.0, 0, ["--until", "trouble"]),
        (1.0, 0, ["--until", "training"]),
        (1.0, 10, ["--until", "finished", "--timeout", "0.1", "--interval", "0.1"]),
        (100.0, 14, []),
        (100.0, 14, ["--until", "finished"]),
        (100.0, 0, ["--until", "ended"]),
    ],
)
def test_exit_codes(
    after: float, code: int, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit codes reflect the state; `--until` waits for a state, or for the end."""
    at(monkeypatch, first_attempt(tmp_path) + after)
    assert main(["watch", str(tmp_path), *options]) == code


def test_every_state_has_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Every state has an exit code, and can be waited for."""
    assert set(watch.CODES) == set(State)
    with pytest.raises(SystemExit):
        main(["watch", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(str(state) in text for state in State if state is not State.UNKNOWN)
    assert all(str(code) in text for code in watch.CODES.values())


def test_changes_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a file, every state is printed once, with the facts known at that time."""
    times = iter([first_attempt(tmp_path) + after for after in (1, 2, 16, 17, 61)])
    clock = SimpleNamespace(
        time=lambda: next(times), monotonic=time.monotonic, sleep=lambda secs: None
    )
    monkeypatch.setattr(watch, "time", clock)
    assert main(["watch", str(tmp_path)]) == watch.CODES[State.DEAD]
    text = capsys.readouterr().out
    assert [text.count(name) for name in ("TRAINING", "SILENT", "DEAD")] == [1, 1, 1]
    assert "last heard 61 s ago" in text


def test_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing log is an error, unless a time limit to wait for it is given."""
    assert main(["watch", str(tmp_path)]) == NOTHING_THERE
    assert main(["watch", str(tmp_path), "--timeout", "0.2", "--interval", "0.1"]) == NOTHING_THERE
    assert "○ UNKNOWN  there is no log in" in capsys.readouterr().out
    assert main(["watch", str(tmp_path), "--interval", "0"]) == 2


def test_temporary_storage_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command continues with the entries that it has read; it ends with an error if it has read
    none."""
    times = iter([first_attempt(tmp_path) + after for after in (1, 2, 13, 61)])
    clock = SimpleNamespace(
        time=lambda: next(times), monotonic=time.monotonic, sleep=lambda secs: None
    )
    monkeypatch.setattr(watch, "time", clock)
    look, asked = watch._Watched.look, []

    def failing(watched: Any, now: float) -> Any:
        asked.append(now)
        if len(asked) == 2:
            raise OSError(116, "Stale file handle")
        return look(watched, now)

    monkeypatch.setattr(watch._Watched, "look", failing)
    assert main(["watch", str(tmp_path)]) == watch.CODES[State.DEAD]
    asked[:] = [0.0]
    monkeypatch.setattr(watch, "time", time)
    assert main(["watch", str(tmp_path)]) == 1
    assert "The run cannot be read: [Errno 116] Stale file handle" in capsys.readouterr().err


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(runs), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["name"], document["state"]) == ("run-0001", "finished")
    assert document["status"]["where"] == []
    assert len(document["incidents"]) == 3


def test_texts_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in a run's texts do not reach the terminal."""
    fits, _, _ = logged.fits(1, 10)
    from keras_distplug.core.events import Raised

    evil = Entry(fits[0].ends_at, "worker-0", Raised("\x1b]0;owned\x07 [red]no room"))
    put(tmp_path, "0", [*fits[0].entries, evil])
    main(["watch", str(tmp_path), "--once"])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "[red]no room" in text


@pytest.mark.parametrize(
    ("options", "name"),
    [([], "mnist.html"), (["--run", "run-0001"], "mnist-run-0001.html")],
)
def test_name_of_a_report(
    options: list[str], name: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is named after the training, and after the run if one is selected."""
    (runs / "out").mkdir()
    monkeypatch.chdir(runs / "out")
    assert main(["report", str(runs), *options]) == 0
    assert [path.name for path in Path().iterdir()] == [name]
    assert f"<title>{name.removesuffix('.html')}: keras_distplug</title>" in Path(name).read_text()
    assert main(["report", str(runs), *options]) == 2


def test_report_to_standard_output(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `-o -`, only the page is printed."""
    assert main(["report", str(runs), "-o", "-"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
