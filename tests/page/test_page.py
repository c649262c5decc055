"""The page in a browser: it shows what happened, without external resources."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from support import logged
from support.browser import Shown, browsed

from keras_distplug import page
from keras_distplug.cli import main
from keras_distplug.core.event_lines import to_line
from keras_distplug.core.events import Entry, Window
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.summary import summary
from keras_distplug.storage.survey import CheckpointState


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    fits, supervised, end = logged.fits(4, 100)
    folder = tmp_path_factory.mktemp("page")
    path = folder / "report.html"
    looked = {1950: CheckpointState("committed", True), 1450: CheckpointState("committed", False)}
    run = summary("run-0001", fits, supervised, end + 60, looked)
    path.write_text(page.html("runs", [run], end + 60))
    dom, console = browsed(path.as_uri(), folder)
    assert console == ""
    return Shown(dom)


def test_headline(shown: Shown) -> None:
    cards = dict(zip(shown.cards[::2], shown.cards[1::2], strict=True))
    assert cards["goodput"] == "68.7 %"  # 0.8 * (2 * 100 - 5) of 2 * 110 + 5 + 2 seconds
    assert cards["step"] == "1,950 of 1,950"
    assert cards["attempts"] == "2"
    assert cards["last checkpoint"] == "step 1,950"
    assert (cards["time left"], cards["speed"]) == ("none", "10 steps/s")
    assert cards["checkpoint safe"] == "yes: step 1,950, 62 s ago, sizes verified"
    assert cards["lost"] == "50 steps in 1 restart (4 s trained twice)"
    assert [cards[name] for name in ("recovers on its own", "next")] == [
        "not needed",
        "Nothing to do.",
    ]


def test_where_the_time_went(shown: Shown) -> None:
    """The legend and the accessible label have the shares."""
    assert "step 68.7 % (2 min 36 s)" in shown.legend
    assert "redone 2.0 % (4.5 s)" in shown.legend
    assert "recovery 2.2 % (5.0 s)" in shown.legend
    assert any("recovery 2.2 %" in label for label in shown.labels)


def test_attempts(shown: Shown) -> None:
    _, second, first = shown.tables["Attempts, newest first"]
    assert first[4:] == ["0 to 1,000", "50", "137", "worker-1 was killed"]
    assert second[4:] == ["950 to 1,950", "0", "", "finished"]


def test_ranking(shown: Shown) -> None:
    """The slow replica is first."""
    _, first, *others = shown.tables["Replicas of the last attempt, slowest first"]
    assert first == ["2", "worker-2 on node-2", "140", "10", "10", "0.533", "compute"]
    assert len(others) == 3
    assert {each[5] for each in others} == {"1"}


def test_checkpoints(shown: Shown) -> None:
    _, *rows = shown.tables["Checkpoints, newest first"]
    assert [row[0] for row in rows] == ["1,950", "1,450", "1,000", "500"]
    assert rows[0][2:] == ["123 MB", "0.4 s", "12.0 ms", "shared", "committed", "sizes verified"]
    assert [row[-2:] for row in rows[1:]] == [
        ["committed, not verified", ""],
        ["replaced", ""],
        ["replaced", ""],
    ]


def test_incidents(shown: Shown) -> None:
    _, *rows = shown.tables["Incidents, newest first, equal ones grouped"]
    assert [row[1] for row in rows] == [
        "Straggler: worker-2, replica 2slow",
        "NaN in `dense/kernel`, replica 1epoch 1, batch 18; a NaN",
        "worker-1 failed (exit code 137)worker-1 was killed",
    ]
    assert rows[1][2] == "worker-1 on node-1"
    assert rows[1][3].endswith("keras-distplug replay DIRECTORY")


def test_texts_are_not_executed(tmp_path: Path) -> None:
    """Texts of a run are shown, not executed."""
    evil = "</script><img src=x onerror=\"document.title='owned'\">"
    path = tmp_path / "report.html"
    fits, supervised, end = logged.fits(2, 10)
    runs = [summary(evil, fits, supervised, end), {"name": f"{evil}2", "error": evil}]
    path.write_text(page.html(evil, runs, end))
    dom, console = browsed(path.as_uri(), tmp_path)
    assert console == ""
    # The first title is the page's, the others belong to charts.
    title, *_ = re.findall(r"<title>(.*?)</title>", dom)
    assert title == evil.replace("<", "&lt;").replace(">", "&gt;")
    assert "<img" not in dom
    assert "&lt;/script&gt;&lt;img" in dom


def test_runs_side_by_side(tmp_path: Path) -> None:
    """Every run has a row; the one with the newest message is shown whole."""
    fits, supervised, end = logged.fits(2, 100)
    done = summary("a", fits, supervised, end, {1950: CheckpointState("committed", True)})
    just_started = summary("b", [only_started(fits[0], end + 1)], [], end + 20)
    broken = {"name": "c", "error": "OSError: it is gone"}
    path = tmp_path / "report.html"
    path.write_text(page.html("runs", [done, just_started, broken], end + 3600))
    dom, console = browsed(path.as_uri(), tmp_path)
    assert console == ""
    shown = Shown(dom)
    _, *rows = shown.tables["All runs; a button shows the run below"]
    share = "68.7 %"
    assert rows == [
        ["a", "✓ finished", share, "1,950", "2", "step 1,950, sizes verified", "1 h 00 min ago"],
        ["b", "▲ silent", "not known", "0", "1", "none", ""],
        ["c", "cannot be shown: OSError: it is gone", "", "", "", "", ""],
    ]
    assert re.findall(r'aria-pressed="true" data-key="(run .)"', dom) == ["run b"]
    assert re.findall(r'<article data-run="(.)"', dom) == ["b"]
    # A run that has only started: no bar lies outside its chart.
    bars = re.findall(r'class="attempt" x="([^"]*)"[^>]*width="([^"]*)"', dom)
    assert bars
    width = float(re.findall(r'<svg width="([\d.]+)"', dom)[0])
    assert all(float(x) >= 0 and 0 < float(of_bar) <= width - float(x) + 0.1 for x, of_bar in bars)


def test_unknown_waits(tmp_path: Path) -> None:
    """The page says for how much time the waiting time is not known."""
    fits, supervised, end = logged.fits(2, 100)
    told = [
        dataclasses.replace(entry, event=dataclasses.replace(entry.event, input_s=None))
        if isinstance(entry.event, Window)
        else entry
        for entry in fits[0].entries
    ]
    run = summary("a", [Fit(fits[0].began, tuple(told)), *fits[1:]], supervised, end)
    path = tmp_path / "report.html"
    path.write_text(page.html("runs", [run], end))
    dom, console = browsed(path.as_uri(), tmp_path)
    assert console == ""
    [note] = re.findall(r'<p data-unknown="(input|sync)">([^<]*)', dom)
    assert note[0] == "input"
    assert note[1].startswith("For 1 min 20 s of steps it is not known how much was waiting for")


def only_started(fit: Fit, begin: float) -> Fit:
    """Returns the same fit with its first event only."""
    return Fit(fit.began, (dataclasses.replace(fit.entries[0], at=begin),))


FOREIGN = re.compile(r"""(?:src|href)\s*=|@import|url\((?!["']?#)|["'`(]//""")


@pytest.mark.parametrize(
    "text",
    [
        '@import "//evil/x.css";',
        "background: url(//evil/x.png)",
        'background: url("//evil/x.png")',
        'fetch("//evil/x")',
        "fetch(`//evil/x`)",
        '<img src="//evil/x">',
    ],
)
def test_external_resources_are_detected(text: str) -> None:
    assert FOREIGN.search(text)


def test_page_is_self_contained() -> None:
    """The only URL is the namespace of SVG."""
    fits, supervised, end = logged.fits(2, 10)
    runs = [summary("run-0001", fits, supervised, end)]
    for text in (page.html("runs", runs, end), page.module()):
        assert set(re.findall(r"https?://[^\s\"']*", text)) == {"http://www.w3.org/2000/svg"}
        assert not FOREIGN.findall(text)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`keras-distplug report` writes the page, and replaces a file only with `--overwrite`."""
    fits, supervised, _ = logged.fits(2, 10)
    folder = tmp_path / "runs" / "run-0001" / "log"
    folder.mkdir(parents=True)
    logs: dict[str, list[Any]] = {"supervisor-job": supervised}
    logs |= {f"{number}": list(fit.entries) for number, fit in enumerate(fits)}
    for stem, entries in logs.items():
        (folder / f"{stem}.jsonl").write_bytes(b"".join(map(to_line, entries)))
    out = tmp_path / "report.html"
    command = ["report", str(tmp_path / "runs"), "-o", str(out)]
    assert main(command) == 0
    found = Shown(browsed(out.as_uri(), tmp_path)[0])
    assert len(found.tables["Attempts, newest first"]) == 3
    out.write_text("kept")
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert out.read_text() == "kept"
    assert main([*command, "--overwrite"]) == 0
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "no" / "r.html")]) == 2
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_loss_across_attempts(tmp_path: Path) -> None:
    """One curve for every attempt, and a cross where one was killed."""
    fits, supervised, end = logged.fits(2, 100)
    with_loss = [Fit(fit.began, tuple(map(_with_loss, fit.entries))) for fit in fits]
    path = tmp_path / "report.html"
    path.write_text(page.html("runs", [summary("a", with_loss, supervised, end)], end))
    dom, console = browsed(path.as_uri(), tmp_path)
    assert console == ""
    chart = dom.partition("Loss over time")[2].partition("</svg>")[0]
    assert re.findall(r'class="curve loss" d="M[^"]+" data-attempt="(.)"', chart) == ["0", "1"]
    assert chart.count('<line class="death"') == 1
    kill = float(re.findall(r'<line class="death" x1="([\d.]+)"', chart)[0])
    ends = [float(x) for x in re.findall(r"[ML]([\d.]+) [\d.]+\" data-attempt", chart)]
    assert abs(kill - ends[0]) < 2 < ends[1] - kill


def _with_loss(entry: Entry) -> Entry:
    if not isinstance(entry.event, Window):
        return entry
    return dataclasses.replace(
        entry, event=dataclasses.replace(entry.event, loss=100 / entry.event.step)
    )
