"""Runs: the folders that contain checkpoints."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Checkpoints
from forks import ending, kill_before, together
from watched import WatchedFiles

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, SaveError
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.runs import create_run, newest_run, read_run
from keras_distplug.storage.stores.local import LocalFiles


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def files(root: Path) -> LocalFiles:
    return LocalFiles(root)


def state(step: int) -> TrainState:
    return TrainState(Cursor(epoch=0, batch=0, step=step), {"x": np.full(3, step)})


def test_no_run(root: Path, files: LocalFiles) -> None:
    """A folder without runs has no newest one, and asking creates nothing."""
    assert newest_run(files) is None
    assert not root.exists()


@pytest.mark.parametrize("job", [None, "job-1"])
def test_start_and_find(files: LocalFiles, job: str | None) -> None:
    """A run that was started is found and read, with its record."""
    run = create_run(files, job=job, seed=7)
    assert run.name == "run-0001"
    assert (run.record.job, run.record.seed) == (job, 7)
    assert newest_run(files) == read_run(files, run.name) == run


def test_next_run(files: LocalFiles) -> None:
    """Every run has a separate folder and a unique ID, and the last one started is the newest."""
    runs = [create_run(files, job=None, seed=seed) for seed in range(3)]
    assert [run.name for run in runs] == ["run-0001", "run-0002", "run-0003"]
    assert len({run.record.run_id for run in runs}) == 3
    assert newest_run(files) == runs[-1]
    assert read_run(files, "run-0001") == runs[0]


def test_many_runs(root: Path, files: LocalFiles) -> None:
    """Runs with more digits than the padding of names are newer."""
    (root / "run-9999").mkdir(parents=True)
    runs = [create_run(files, job=None, seed=0) for _ in range(2)]
    assert [run.name for run in runs] == ["run-10000", "run-10001"]
    assert newest_run(files) == runs[-1]


def test_foreign_files(root: Path, files: LocalFiles) -> None:
    """A folder that is not a run's is ignored, and not changed."""
    for name in ("run-1", "run-0007.bak", "notes", "my-run-0009"):
        (root / name).mkdir(parents=True)
        (root / name / "RUN.json").write_text("mine")
    (root / "run-0003").write_text("a file")
    assert newest_run(files) is None
    assert create_run(files, job=None, seed=0).name == "run-0004"
    assert (root / "notes/RUN.json").read_text() == "mine"


def test_after_a_deleted_run(files: LocalFiles) -> None:
    """If the newest run is deleted, the previous one is the newest, and a new run is a different
    one."""
    first, second = (create_run(files, job=None, seed=seed) for seed in range(2))
    Checkpoints(files, run=second.name).save(state(1))
    Checkpoints(files, run=second.name).delete_run()
    assert files.names() == [first.name]
    assert newest_run(files) == first
    third = create_run(files, job=None, seed=2)
    assert third.record.run_id != second.record.run_id
    assert newest_run(files) == third
    assert Checkpoints(files, run=third.name).newest("step") is None


def test_delete_twice(files: LocalFiles) -> None:
    """Deleting a run that does not exist is not an error."""
    run = create_run(files, job=None, seed=0)
    Checkpoints(files, run=run.name).delete_run()
    Checkpoints(files, run=run.name).delete_run()
    assert files.names() == []


def test_killed_deletion(tmp_path: Path) -> None:
    """A deletion that is killed at any point leaves the run intact or deleted: it never reappears
    in part."""
    template = LocalFiles(tmp_path / "template")
    old, deleted = (create_run(template, job=None, seed=seed) for seed in range(2))
    for step in (1, 2):
        Checkpoints(template, run=deleted.name).save(state(step))
    gone = []
    for number in itertools.count(1):
        root = shutil.copytree(template.where(), tmp_path / str(number))
        files = LocalFiles(root)

        def delete(files: LocalFiles = files, number: int = number) -> None:
            kill_before(number)
            Checkpoints(files, run=deleted.name).delete_run()

        ended = ending(delete)
        newest = newest_run(files)
        gone.append(newest == old)
        if newest == deleted:
            for step in (1, 2):
                Checkpoints(files, run=deleted.name).read(f"step-0000000{step}")
        else:
            assert newest == old
            new = create_run(files, job=None, seed=2)
            assert newest_run(files) == new
            assert files.names(new.name) == ["RUN.json"]
        if ended == 0:
            assert not (root / deleted.name / "step-00000001").exists()
            break
        assert ended == -signal.SIGKILL
    assert number > 20
    assert gone == sorted(gone)
    assert set(gone) == {False, True}


def test_killed_start(tmp_path: Path) -> None:
    """A process that is killed at any point while it starts a run leaves a complete run, or
    none."""
    was_started = []
    for number in itertools.count(1):
        files = LocalFiles(tmp_path / str(number))

        def begin(files: LocalFiles = files, number: int = number) -> None:
            kill_before(number)
            create_run(files, job="job", seed=5)

        ended = ending(begin)
        run = newest_run(files)
        was_started.append(run is not None)
        assert run is None or run.record.seed == 5
        assert newest_run(files) == run
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        assert newest_run(files) != create_run(files, job=None, seed=6)
        assert newest_run(files).record.seed == 6
    assert number > 10
    assert was_started == sorted(was_started)
    assert set(was_started) == {False, True}


def test_separate_folders(files: LocalFiles) -> None:
    """Processes that start runs at the same time get different folders."""
    count = 6
    begin = [lambda i=i: create_run(files, job=f"job-{i}", seed=i) for i in range(count)]
    assert together(begin) == [0] * count
    runs = [read_run(files, name) for name in files.names()]
    assert [run.name for run in runs] == [f"run-000{number}" for number in range(1, count + 1)]
    assert {run.record.job for run in runs} == {f"job-{i}" for i in range(count)}


def test_damaged_record(root: Path, files: LocalFiles) -> None:
    """A record with a changed character is rejected, or has the same meaning; the message names the
    remedy, and a new run can be started alongside it."""
    run = create_run(files, job="job", seed=123)
    record = root / run.name / "RUN.json"
    text = record.read_text()
    for position, old in enumerate(text):
        changed = text[:position] + chr(ord(old) ^ 1) + text[position + 1 :]
        record.write_text(changed)
        try:
            if json.loads(changed) == json.loads(text):
                assert not old.isalnum()
                continue
        except ValueError:
            pass
        with pytest.raises(CorruptCheckpointError, match="resume=False"):
            newest_run(files)
    second = create_run(files, job=None, seed=1)
    assert newest_run(files) == second
    assert second.name == "run-0002"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b"null", b"{}", b"\xff\xfe\x00"])
def test_no_record(root: Path, files: LocalFiles, content: bytes) -> None:
    """A record with other contents is rejected by name; the folder is not taken for an empty
    one."""
    run = create_run(files, job=None, seed=0)
    (root / run.name / "RUN.json").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=str(root / run.name / "RUN.json")):
        newest_run(files)


def test_missing_record(files: LocalFiles) -> None:
    """A worker that does not see the run gets the message that all workers must see the same
    folder."""
    with pytest.raises(CheckpointError, match="every worker must see this folder") as raised:
        read_run(files, "run-0001")
    assert not isinstance(raised.value, CorruptCheckpointError)


@pytest.mark.parametrize(("method", "part"), [("read", "RUN.json"), ("names", "")])
def test_unreadable(files: LocalFiles, method: str, part: str) -> None:
    """A run that cannot be read is an error; it does not count as missing."""
    run = create_run(files, job=None, seed=0)
    watched = WatchedFiles(files)
    watched.fail(method, part, PermissionError(errno.EACCES, "no"))
    with pytest.raises(CheckpointError, match="permissions") as raised:
        newest_run(watched)
    assert not isinstance(raised.value, CorruptCheckpointError)
    assert watched.fired == 1
    watched.mend()
    assert newest_run(watched) == run


@pytest.mark.parametrize(("method", "error"), [("create", SaveError), ("names", CheckpointError)])
def test_failed_start(files: LocalFiles, method: str, error: type[CheckpointError]) -> None:
    """If a run cannot be started, the error names the folder."""
    watched = WatchedFiles(files)
    watched.fail(method, "", OSError(errno.EROFS, "read-only"))
    with pytest.raises(error, match=f"{files.where()}.*read-only"):
        create_run(watched, job=None, seed=0)
    assert watched.fired == 1


def test_failed_deletion(files: LocalFiles) -> None:
    """If a run cannot be deleted, the error names the folder."""
    run = create_run(files, job=None, seed=0)
    watched = WatchedFiles(files)
    watched.fail("delete", run.name, OSError(errno.EROFS, "read-only"))
    with pytest.raises(
        CheckpointError, match=rf"{run.name}/RUN\.json could not be deleted: .*read-only"
    ):
        Checkpoints(watched, run=run.name).delete_run()
    assert watched.fired == 1
    assert newest_run(files) == run
