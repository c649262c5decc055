"""The log of a job whose worker is killed: all attempts, and the use of every second."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from support import fault
from support.browser import Shown, browsed, photographed
from support.cluster import environment, run_job
from support.curves import curves_in

from keras_distplug.cli import main
from keras_distplug.core import events
from keras_distplug.core.event_lines import from_line
from keras_distplug.core.events import Entry
from keras_distplug.core.ledger import Category
from keras_distplug.runlog import goodput_totals, log_files
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.last_attempt import Before
from keras_distplug.storage.files import open_files

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "faulty.py"
FAULT = fault.kill(1, at_step=7)
LATE = 1  # the worker whose data is late
STEPS = 3  # in an epoch
EPOCHS = 4
OF_OTHERS = ("Multiple instances of Three.js", "software WebGL")  # error messages of other tabs


@dataclass(frozen=True)
class Job:
    folder: Path
    output: str
    fits: list[Fit]
    supervised: list[Entry]
    noted: list[Entry]  # the supervisor's own log (`--log`)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    log = folder / "events"
    fault.write(folder, [FAULT])
    command = [str(SCRIPT), str(folder), "plain_fit"]
    late = {"KERAS_DISTPLUG_TEST_LATE": str(LATE)}
    ended = run_job(command, 2, f"--log={log}", env=late, timeout_s=450)
    assert ended.returncode == 0, ended.output
    assert [each.who for each in fault.fired(folder)] == [FAULT.who]
    fits, supervised = log_files.read(open_files(folder / "runs"), "run-0001")
    noted = [entry for line in log.read_bytes().splitlines() if (entry := from_line(line))]
    return Job(folder, ended.output, fits, supervised, noted)


def test_sources(job: Job) -> None:
    """The log has every worker of every attempt, and the supervisor with the events of `--log`."""
    reported = [(each.began.rank, each.entries[0].attempt) for each in job.fits]
    assert sorted(reported) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert job.supervised == job.noted
    assert {entry.job for fit in job.fits for entry in fit.entries} == {job.noted[0].job}
    kinds = [type(entry.event).__name__ for entry in job.noted]
    assert kinds[:3] == ["Started", "Training", "Failed"]
    assert kinds[-1] == "Ended"


def test_attempts(job: Job) -> None:
    """The first attempt ended with the kill, and its cost; the second one finished."""
    first, second = goodput_totals.attempts(job.fits, job.supervised)
    assert first.exit_code == 137
    assert first.end is not None
    assert "worker-1 was killed by SIGKILL" in first.end
    assert (first.workers, second.workers) == (2, 2)
    reported = [entry.event for fit in job.fits for entry in fit.entries]
    restored = [event.step for event in reported if isinstance(event, events.Restored)]
    assert restored == [second.first_step] * 2
    assert first.last_step - second.first_step == first.lost_steps
    assert (second.end, second.lost_steps) == ("finished", 0)
    # The terminal shows the same, with exact numbers.
    assert (first.number, second.number) == (1, 2)
    lost = Before(1, first.last_step, has_told_all=True).loss(second.first_step)
    assert f"(attempt 2; {lost})" in job.output


def test_time_of_the_whole_job(job: Job) -> None:
    """The categories add up to the time from the supervisor's start to its exit."""
    found = goodput_totals.spans(goodput_totals.chiefs(job.fits), job.supervised)
    secs = goodput_totals.totals(found)
    wall_s = job.noted[-1].at - job.noted[0].at
    assert sum(secs.values()) == pytest.approx(wall_s, rel=0.005)
    assert all(value >= 0 for value in secs.values())
    some = (Category.STEP, Category.START_UP, Category.RECOVERY, Category.RESTORE, Category.SAVE)
    assert all(secs[category] > 0 for category in (*some, Category.SYNC, Category.EVALUATION))
    of_death = next(e.at for e in job.noted if isinstance(e.event, events.Failed))
    assert goodput_totals.totals(found, since=of_death)[Category.RECOVERY] > 0


def test_command(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", str(job.folder / "runs"), "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert sum(run["secs"].values()) == pytest.approx(run["wall_secs"])
    assert [each["exit_code"] for each in run["attempts"]] == [137, None]
    assert sorted(run["workers"]) == ["0", "1"]


def test_replicas(job: Job) -> None:
    """Every worker logs its own replica."""

    def of(fit: Fit) -> set[Any]:
        windows = [e.event for e in fit.entries if isinstance(e.event, events.Window)]
        return {each.replica for window in windows for each in window.replicas}

    assert all(of(fit) <= {fit.began.rank} for fit in job.fits)
    assert set.union(*map(of, job.fits)) == {0, 1}


def test_curves_of_keras(job: Job) -> None:
    """Keras' TensorBoard callback in the same directory has a point for every batch.

    This holds although the chief that wrote them ended with the killed worker.
    """
    curves = curves_in(job.folder / "runs", ["train", "validation"])
    for run in ("train", "validation"):
        assert [step for step, _ in curves[run]["epoch_loss"]] == list(range(EPOCHS))
    first, second = goodput_totals.attempts(job.fits, job.supervised)
    steps = [step for step, _ in curves["train"]["batch_loss"]]
    assert steps == list(range(1, STEPS * EPOCHS + 1))
    assert 0 < second.first_step <= first.last_step


@contextmanager
def tensorboard(logdir: Path, *options: str) -> Iterator[str]:
    """Returns the address of TensorBoard."""
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={logdir}", "--port=0"]
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as server:
        assert server.stderr is not None
        try:
            # Its exit also ends its output.
            found = (re.search(r"at (http://localhost:\d+/)", line) for line in server.stderr)
            address = next(filter(None, found), None)
            assert address is not None
            yield address[1]
        finally:
            server.terminate()


@pytest.mark.tf
@pytest.mark.parametrize("fast", ["true", "false"])
def test_tensorboard(job: Job, fast: str, tmp_path: Path) -> None:
    """The tab shows what the command prints, whichever of TensorBoard's servers reads the data."""
    pictures = Path(os.environ.get("KERAS_DISTPLUG_TEST_PICTURES", tmp_path))
    with tensorboard(job.folder / "runs", f"--load_fast={fast}") as address:
        entry = f"{address}data/plugin_entry.html?name=distplug"
        dom, console = browsed(entry, tmp_path)
        whole, console_of_all = browsed(f"{address}#distplug", tmp_path)
        with urllib.request.urlopen(f"{address}data/plugin/custom_scalars/layout") as answer:
            layout = json.load(answer)
        scalars = f"{address}data/plugin/scalars/tags"
        with urllib.request.urlopen(scalars) as answer:
            tags = json.load(answer)
        for theme in ("light", "dark"):
            picture = pictures / f"distplug-{theme}.png"
            photographed(entry, tmp_path, picture, is_dark=theme == "dark")
            assert picture.stat().st_size > 10_000
            # The dark and light themes are dark and light.
            assert (brightness(picture) < 0.4) == (theme == "dark")
    assert console == ""
    ours = [line for line in console_of_all.splitlines() if not any(map(line.count, OF_OTHERS))]
    assert ours == []
    assert "Distplug" in whole
    [charts] = [each["chart"] for each in layout["category"] if each["title"] == "Distplug"]
    assert [each["title"] for each in charts] == ["goodput", "where the time went"]
    assert "goodput/whole_run" in tags["run-0001/log/goodput"]
    _is_right(Shown(dom), job)


def brightness(picture: Path) -> float:
    """Returns a brightness from 0 to 1."""
    pixels = tf.io.decode_png(picture.read_bytes(), channels=1)
    return float(tf.reduce_mean(tf.cast(pixels, tf.float32))) / 255


def test_report(job: Job, tmp_path: Path) -> None:
    """The same page, as a file."""
    out = tmp_path / "report.html"
    assert main(["report", str(job.folder / "runs"), "-o", str(out)]) == 0
    dom, console = browsed(out.as_uri(), tmp_path)
    assert console == ""
    _is_right(Shown(dom), job)


def _is_right(shown: Shown, job: Job) -> None:
    secs = goodput_totals.totals(
        goodput_totals.spans(goodput_totals.chiefs(job.fits), job.supervised)
    )
    share = secs[Category.STEP] / sum(secs.values())
    cards = dict(zip(shown.cards[::2], shown.cards[1::2], strict=True))
    assert cards["goodput"] == f"{100 * share:.1f} %"
    first, second = goodput_totals.attempts(job.fits, job.supervised)
    assert cards["step"] == f"{second.last_step:,} of {second.last_step:,}"
    assert cards["last checkpoint"] == f"step {second.last_step:,}"
    assert cards["checkpoint safe"].startswith(f"yes: step {second.last_step:,}, ")
    assert cards["checkpoint safe"].endswith(", sizes verified")
    _, *rows = shown.tables["Attempts, newest first"]
    assert [row[3:] for row in rows] == [
        ["2", f"{second.first_step:,} to {second.last_step:,}", "0", "", "finished"],
        ["2", f"0 to {first.last_step:,}", f"{first.lost_steps:,}", "137", first.end],
    ]
    # The restored checkpoint no longer exists, but all of it was read.
    _, *saved = shown.tables["Checkpoints, newest first"]
    assert saved[0][-2:] == ["committed", "sizes verified"]
    _, *ranked = shown.tables["Replicas of the last attempt, slowest first"]
    assert [row[0] for row in ranked] == [str(LATE), str(1 - LATE)]
    assert ranked[0][1].startswith(f"worker-{LATE} on ")
    late, other = (float(row[3]) for row in ranked)
    assert late > other
    assert [float(row[5]) < 1 for row in ranked] == [True, False]
    _, *incidents = shown.tables["Incidents, newest first, equal ones grouped"]
    assert incidents[-1][1].startswith("worker-1 failed (exit code 137)worker-1 was killed")
    assert incidents[-1][2].startswith("worker-1 on ")
    share = secs[Category.RECOVERY] / sum(secs.values())
    assert any(each.startswith(f"recovery {100 * share:.1f} %") for each in shown.legend)
