"""The supervisor's events in the logs of its workers' runs."""

from __future__ import annotations

import stat
from pathlib import Path

from keras_distplug.core import events
from keras_distplug.core.supervised import Supervised
from keras_distplug.runlog.log_files import open_beside, read
from keras_distplug.storage.files import open_files
from keras_distplug.supervisor.event_log import EventLog, Place


def test_several_runs(tmp_path: Path) -> None:
    """If a job trains several runs, every log contains the events during its own training."""
    a, b = ((str(tmp_path / name), "run-0001/log", dict[str, str]()) for name in "ab")
    place: list[Place | None] = [None]
    with EventLog(None, "job", open_beside) as log:
        log.ask(lambda: place[0])
        log.note(events.Started(("worker-0",), (0,)), 0)
        for each, event in (
            (a, events.Training()),
            (b, events.Failed("worker-0", "KILLED", 137, "killed in b")),
            (None, events.Again(1.0, (0,))),
            (a, events.Ended(0, "")),
        ):
            place[0] = each
            log.note(event, 0)
    logged = [
        [type(entry.event).__name__ for entry in read(open_files(tmp_path / name), "run-0001")[1]]
        for name in "ab"
    ]
    assert logged == [["Started", "Training", "Ended"], ["Failed", "Again"]]


def test_passwords(tmp_path: Path) -> None:
    """Storage options are not readable by other users."""
    contract = Supervised("j", 0, tmp_path / "status")
    contract.report_log_folder("s3://bucket/run", "log", {"secret": "hunter2"})
    assert contract.logs() == ("s3://bucket/run", "log", {"secret": "hunter2"})
    assert stat.S_IMODE((tmp_path / "status" / "logs").stat().st_mode) == 0o600
