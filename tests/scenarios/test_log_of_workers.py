"""The log of a job whose worker is killed: all its attempts, and where each second went."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cluster import run_job

from keras_distplug.cli import main
from keras_distplug.core import events, goodput
from keras_distplug.core.events import Entry, from_line
from keras_distplug.core.goodput import Fit
from keras_distplug.core.ledger import Category
from keras_distplug.storage import run_log
from keras_distplug.storage.files import open_files

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "faulty.py"
FAULT = "0:1:2:1:kill"


@dataclass(frozen=True)
class Job:
    folder: Path
    fits: list[Fit]
    supervised: list[Entry]
    noted: list[Entry]  # what `--log` has of it


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    log = folder / "events"
    command = [str(SCRIPT), str(folder), "plain_fit", FAULT]
    ended = run_job(command, 2, f"--log={log}", timeout_s=450)
    assert ended.returncode == 0, ended.output
    assert (folder / "faults").read_text().split() == [FAULT]
    fits, supervised = run_log.read(open_files(folder / "runs"), "run-0001")
    noted = [entry for line in log.read_bytes().splitlines() if (entry := from_line(line))]
    return Job(folder, fits, supervised, noted)


def test_who_has_told(job: Job) -> None:
    """Each worker in each attempt, and the supervisor, which says there what `--log` has."""
    told = [(each.began.rank, each.entries[0].attempt) for each in job.fits]
    assert sorted(told) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert job.supervised == job.noted
    assert {entry.job for fit in job.fits for entry in fit.entries} == {job.noted[0].job}
    kinds = [type(entry.event).__name__ for entry in job.noted]
    assert kinds[:3] == ["Started", "Training", "Failed"]
    assert kinds[-1] == "Ended"


def test_attempts(job: Job) -> None:
    """The first one ended by the kill, with what it cost; the second one finished."""
    first, second = goodput.attempts(job.fits, job.supervised)
    assert first.exit_code == 137
    assert first.end is not None
    assert "worker-1 was killed by SIGKILL" in first.end
    assert (first.workers, second.workers) == (2, 2)
    restored = [
        e.event for f in job.fits for e in f.entries if isinstance(e.event, events.Restored)
    ]
    assert {each.step for each in restored} == {second.first_step}
    assert first.last_step - second.first_step == first.lost_steps
    assert (second.end, second.lost_steps) == ("finished", 0)


def test_every_second(job: Job) -> None:
    """The categories sum to the time from the supervisor's first start to its end."""
    found = goodput.spans(goodput.chiefs(job.fits), job.supervised)
    secs = goodput.totals(found)
    wall_s = job.noted[-1].at - job.noted[0].at
    assert sum(secs.values()) == pytest.approx(wall_s, rel=0.005)
    assert all(value >= 0 for value in secs.values())
    some = (Category.STEP, Category.START_UP, Category.RECOVERY, Category.RESTORE, Category.SAVE)
    assert all(secs[category] > 0 for category in (*some, Category.SYNC, Category.EVALUATION))
    of_death = next(e.at for e in job.noted if isinstance(e.event, events.Failed))
    assert goodput.totals(found, since=of_death)[Category.RECOVERY] > 0


def test_command(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", str(job.folder / "runs"), "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert sum(run["secs"].values()) == pytest.approx(run["wall_secs"])
    assert [each["exit_code"] for each in run["attempts"]] == [137, None]
    assert sorted(run["workers"]) == ["0", "1"]


def test_replicas(job: Job) -> None:
    """Of each worker, its own replica."""

    def of(fit: Fit) -> set[Any]:
        windows = [e.event for e in fit.entries if isinstance(e.event, events.Window)]
        return {each.replica for window in windows for each in window.replicas}

    assert all(of(fit) <= {fit.began.rank} for fit in job.fits)
    assert set.union(*map(of, job.fits)) == {0, 1}
