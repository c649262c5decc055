"""Only one process at a time writes in a directory; one that has lost it notices."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import RUN, Checkpoints
from support.owners import HERE, PATIENT, require_one_winner, silent

from keras_distplug.core.errors import CheckpointError, FencedError, InUseError, SaveError
from keras_distplug.core.process import Process, is_alive, this_process
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.core.threads import run_in_daemon
from keras_distplug.storage import ownership, runs
from keras_distplug.storage.commit import Writer
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.ownership import FOLDER, Timing
from keras_distplug.storage.store import CheckpointStore

# A process that owns a directory until its input ends.
OWNER = """
import sys
from keras_distplug.storage import ownership
from keras_distplug.storage.files import open_files
timing = ownership.Timing(beat_secs=0.02)
owned = ownership.claim(open_files(sys.argv[1]), print, timing=timing)
print("claimed", flush=True)
for line in sys.stdin:
    try:
        owned.require()
        print("owns", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""
HASTY = Timing(beat_secs=60.0, stale_secs=0.1, look_secs=0.01)
ELSEWHERE = replace(HERE, host="another", boot="another")


@pytest.fixture(autouse=True)
def end_heartbeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the heartbeats that a test has started and not ended."""
    started: list[ownership.Ownership] = []
    stock = ownership.Ownership.start_beating

    def start_beating(self: ownership.Ownership) -> None:
        started.append(self)
        stock(self)

    monkeypatch.setattr(ownership.Ownership, "start_beating", start_beating)
    yield
    for each in started:
        each._end()


@contextmanager
def owner(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "claimed\n"
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.timeout(60)
def test_live_owner(tmp_path: Path) -> None:
    """A second process is refused without waiting, with the name of the first one; once that one is
    dead, it takes over without waiting."""
    files = open_files(tmp_path)
    with owner(tmp_path) as first:
        with pytest.raises(InUseError) as raised:
            ownership.claim(files, silent)
        assert f"process {first.pid} on {HERE.host} (started 2" in str(raised.value)
        assert ask(first) == "owns\n"
        first.send_signal(signal.SIGKILL)
        first.wait()
        ownership.claim(files, silent).release()


@pytest.mark.timeout(60)
def test_stopped_owner(tmp_path: Path) -> None:
    """A process that is suspended for longer than the limit loses the directory, and notices."""
    files, said = open_files(tmp_path), []
    with owner(tmp_path) as first:
        first.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        second = ownership.claim(files, said.append, timing=HASTY)
        assert len(said) == 1
        assert f"process {first.pid} on" in said[0]
        first.send_signal(signal.SIGCONT)
        answer = ask(first)
        assert answer.startswith("FencedError ")
        assert f"taken over by process {os.getpid()} on" in answer
        second.require()
        second.release()


@pytest.mark.timeout(60)
def test_processes_of_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a process of a pool says how the fits of a script can share a folder."""
    files = open_files(tmp_path)
    with owner(tmp_path):
        with pytest.raises(InUseError) as of_a_job:
            ownership.claim(files, print)
        monkeypatch.setattr("multiprocessing.parent_process", lambda: "the script")
        with pytest.raises(InUseError, match=r"one after another, .*n_jobs=1"):
            ownership.claim(files, print)
    assert "n_jobs" not in str(of_a_job.value)


@pytest.mark.timeout(60)
def test_on_another_machine(tmp_path: Path) -> None:
    """If the owner cannot be seen, its heartbeat decides, by the watcher's own clock."""
    files, said = open_files(tmp_path), []
    with owner(tmp_path), pytest.raises(InUseError):
        ownership.claim(files, said.append, here=ELSEWHERE, timing=PATIENT)
    # It is dead now, which cannot be seen from here.
    ownership.claim(files, said.append, here=ELSEWHERE, timing=HASTY).release()
    assert len(said) == 2
    assert "waiting up to 60 s for a sign of life" in said[0]


@pytest.mark.timeout(60)
def test_copied_folder(tmp_path: Path) -> None:
    """A copy that is made while its owner trains can be used: the owner does not touch it. The
    folder itself still belongs to the owner if it is opened by another path."""
    folder, alias = tmp_path / "a", tmp_path / "alias"
    with owner(folder) as first:
        shutil.copytree(folder, tmp_path / "copy")
        alias.symlink_to(folder)
        lines: list[str] = []
        ownership.claim(open_files(tmp_path / "copy"), lines.append, timing=HASTY).release()
        assert [f"{tmp_path}/copy was last used by" in line for line in lines] == [True]
        with pytest.raises(InUseError):
            ownership.claim(open_files(alias), lines.append)
        assert ask(first) == "owns\n"


def test_released(tmp_path: Path) -> None:
    """After a training has ended, the next process takes the directory without waiting."""
    files = open_files(tmp_path)
    ownership.claim(files, silent).release()
    ownership.claim(files, silent, here=ELSEWHERE).release()


def test_exit_during_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit of a process waits for a release that another thread has started."""
    files = open_files(tmp_path)
    monkeypatch.setattr(ownership, "_held", {})
    owned = ownership.claim(files, silent)
    is_writing, may_write = threading.Event(), threading.Event()
    stock = type(files).create

    def create(self: Files, path: str, parts: list[bytes]) -> None:
        is_writing.set()
        assert may_write.wait(30)
        stock(self, path, parts)

    monkeypatch.setattr(type(files), "create", create)
    releases = run_in_daemon(owned.release, "release")
    assert is_writing.wait(30)
    exits = run_in_daemon(ownership._release_all, "exit")
    with pytest.raises(TimeoutError):
        exits.result(0.2)
    may_write.set()
    exits.result(30)
    assert (tmp_path / FOLDER / "0001.released").exists()
    releases.result(30)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({}, True),
        ({"ticks": HERE.ticks + 1}, False),  # its number was given to another process
        ({"pid": 2**22 + 1}, False),  # there are no such numbers
        ({"boot": "another"}, None),
        ({"boot": ""}, None),
        ({"namespace": "another"}, None),
        ({"namespace": "another", "pod": "a"}, False),  # a container that was started again
        ({"namespace": "another", "boot": "another", "pod": "a"}, None),
        ({"boot": "another", "job": "Slurm job 7 of a", "attempt": 1}, False),  # requeued
        ({"boot": "another", "job": "Slurm job 7 of a", "attempt": 2}, None),  # a step next to us
        ({"boot": "another", "job": "Slurm job 8 of a", "attempt": 1}, None),
    ],
)
def test_signs_of_life(change: dict[str, object], seen: bool | None) -> None:
    here = replace(HERE, pod="a", job="Slurm job 7 of a", attempt=2)
    assert is_alive(replace(HERE, **change), here) is seen  # type: ignore[arg-type]


def test_hidden_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that `/proc` does not show, such as another user's, may be alive."""
    monkeypatch.setattr("keras_distplug.core.process._read_process", lambda pid: None)
    assert is_alive(HERE, HERE) is None
    assert is_alive(replace(HERE, pid=2**22 + 1), HERE) is False


def test_attempts() -> None:
    """Schedulers and our supervisor count the starts of a job."""
    slurm = this_process({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"})
    assert (slurm.job, slurm.attempt) == ("Slurm job 7 of ", 2)
    ours = this_process({"KERAS_DISTPLUG_JOB": "a", "KERAS_DISTPLUG_ATTEMPT": "3"})
    assert (ours.job, ours.attempt) == ("a", 3)
    uid = "0b9c8f0e-5c1d-4a5e-9a51-0c6f4f3f1b11"
    mounts = (
        f"1 2 8:1 /var/lib/kubelet/pods/{uid}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
        f"1 2 8:1 /var/lib/kubelet/pods/{uid}/containers/train/4f1 /dev/termination-log rw - ext4\n"
    )
    assert this_process(mounts=mounts).pod == f"{uid}/train"
    assert this_process(mounts="1 2 8:1 / / rw - ext4 /dev/sda1 rw\n").pod == ""


@pytest.mark.parametrize("url", ["disk", "memory://{}"])
def test_races(url: str, tmp_path: Path) -> None:
    """If several writers claim at the same time, one wins, and the others are refused."""
    for number in range(25):
        place = f"{tmp_path}/{number}" if url == "disk" else url.format(f"{tmp_path}/{number}")
        require_one_winner(open_files(place))


def test_in_one_process(tmp_path: Path) -> None:
    """A `fit` that failed before it started leaves the directory to the next one in its process; a
    `fit` that is training does not."""
    files = open_files(tmp_path)
    first = ownership.claim(files, silent)
    assert ownership.claim(open_files(tmp_path), silent) is first
    first.is_training = lambda: True
    with pytest.raises(InUseError, match=f"in which process {os.getpid()} on"):
        ownership.claim(files, silent)
    first.release()
    assert ownership.claim(files, silent) is not first


def test_old_claims(tmp_path: Path) -> None:
    """Old claims do not accumulate."""
    files = open_files(tmp_path)
    for _ in range(5):
        ownership.claim(files, silent).release()
    assert [name for name in files.names(FOLDER) if name.endswith(".json")] == ["0005.json"]
    assert len(files.names(FOLDER)) == 3


def test_deleted_folder(tmp_path: Path) -> None:
    """A process whose directory was deleted and claimed again has lost it: numbers start again, but
    the claim is a different one, whatever the first process's heartbeat does."""
    files = open_files(tmp_path / "a")
    first = ownership.claim(files, silent)
    shutil.rmtree(tmp_path / "a")
    first.beat()
    second = ownership._win(files, silent, replace(HERE, started_utc="later"), PATIENT)
    first.beat()
    assert len([name for name in files.names(FOLDER) if name.endswith(".beat")]) == 2
    with pytest.raises(FencedError):
        first.require()
    second.require()
    with pytest.raises(InUseError):
        ownership._win(files, [].append, ELSEWHERE, PATIENT)
    second.release()


def test_purged_folder(tmp_path: Path) -> None:
    """A process whose claim was deleted and not replaced still owns the directory."""
    files = open_files(tmp_path)
    first = ownership.claim(files, silent)
    shutil.rmtree(tmp_path / FOLDER)
    first.require()
    with pytest.raises(InUseError):
        ownership._win(files, silent, replace(HERE, started_utc="later"), PATIENT)
    first.release()


def test_late_claim(tmp_path: Path) -> None:
    """A claim is withdrawn if newer ones were made and deleted before it was written."""
    files = open_files(tmp_path)
    newer = ownership.Ownership(files, 7, HERE, PATIENT)
    assert newer.make()
    assert not ownership.Ownership(files, 3, HERE, PATIENT).make()
    assert not [name for name in files.names(FOLDER) if name.startswith("0003")]
    newer.require()


def test_folder_that_changes_owners(tmp_path: Path) -> None:
    """A process that watches an owner checks again if another claim replaces it."""
    files, said = open_files(tmp_path), []
    first = ownership.Ownership(files, 1, replace(HERE, boot="a"), PATIENT)
    assert first.make()

    def replace_first(line: str) -> None:
        said.append(line)
        first.remove()
        ownership.Ownership(files, 1, HERE, PATIENT).make()

    with pytest.raises(InUseError):
        ownership._win(files, replace_first, replace(HERE, started_utc="later"), PATIENT)
    assert len(said) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"host": 1}'])
@pytest.mark.timeout(60)
def test_damaged_claim(text: str, tmp_path: Path) -> None:
    """A claim that does not identify its owner counts by its heartbeat."""
    files, said = open_files(tmp_path), []
    files.create(f"{FOLDER}/0001.json", [text.encode()])
    ownership.claim(files, said.append, timing=HASTY).release()
    assert "was last used by another process" in said[0]


def test_unwritable(tmp_path: Path) -> None:
    """An unwritable directory is noticed before anything is trained."""
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(SaveError, match=r"Nothing can be saved in .*Check the storage"):
        ownership.claim(open_files(tmp_path), silent)


# Saves


def write(files: Files, step: int, owned: ownership.Ownership) -> CheckpointStore:
    checkpoints = Checkpoints(files, owned=owned)
    checkpoints.save(TrainState(Cursor(0, step, step), {"model/a": np.arange(3.0)}))
    return checkpoints


def written(folder: Path) -> set[Path]:
    """Returns all files except the temporary ones of a heartbeat."""
    return {path for path in folder.rglob("*") if path.suffix != ".tmp"}


def test_fenced_save(tmp_path: Path) -> None:
    """A process that has lost the directory commits nothing and deletes nothing."""
    files = open_files(tmp_path)
    first = ownership._win(files, silent, HERE, PATIENT)
    runs.create_run(files, job=None, seed=0)
    write(files, 1, first)
    first.release()
    second = ownership._win(files, silent, HERE, PATIENT)
    store = write(files, 2, second)
    before = written(tmp_path)
    with pytest.raises(FencedError):
        write(files, 3, first)
    assert store.committed("step") == ["step-00000001", "step-00000002"]
    assert before <= written(tmp_path)
    write(files, 4, second)
    assert store.committed("step") == ["step-00000002", "step-00000004"]


def test_lost_during_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was suspended between its check and its commit checks again: it withdraws the
    commit and deletes nothing else."""
    files = open_files(tmp_path)
    first = ownership._win(files, silent, HERE, PATIENT)
    runs.create_run(files, job=None, seed=0)
    for step in (1, 2):
        store = write(files, step, first)
    publish = Writer._publish

    def stop_before(self: Writer, path: str, text: bytes) -> None:
        first.release()
        ownership._win(files, silent, HERE, PATIENT)
        now_s = ownership.unsuspended_s()
        monkeypatch.setattr(ownership, "unsuspended_s", lambda: now_s + 61)
        publish(self, path, text)

    monkeypatch.setattr(Writer, "_publish", stop_before)
    with pytest.raises(FencedError):
        write(files, 3, first)
    assert store.committed("step") == ["step-00000001", "step-00000002"]


def test_failed_save_of_a_zombie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leftovers are deleted after a failed save, but not by a process that has lost the directory:
    they may belong to a save of the new owner."""
    files = open_files(tmp_path)
    first = ownership._win(files, silent, HERE, PATIENT)
    runs.create_run(files, job=None, seed=0)
    write(files, 1, first)
    first.release()
    ownership._win(files, silent, HERE, PATIENT)
    in_progress = tmp_path / RUN / "step-00000005" / "a-1" / "rank-0-1.safetensors"
    in_progress.parent.mkdir(parents=True)
    in_progress.write_bytes(b"a")

    def fail(*_: object) -> None:
        raise PermissionError("of a share")

    monkeypatch.setattr(Writer, "_write_share", fail)
    with pytest.raises(FencedError):
        write(files, 2, first)
    assert in_progress.exists()


def test_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save checks the ownership once."""
    files = open_files(tmp_path)
    owned = ownership._win(files, silent, HERE, replace(PATIENT, beat_secs=60.0))
    runs.create_run(files, job=None, seed=0)
    asked: list[str] = []
    names = type(files).names

    def counted(self: Files, folder: str = "") -> list[str]:
        asked.append(folder)
        return names(self, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(type(files), "names", counted)
    write(files, 1, owned)
    assert asked.count(FOLDER) == 1


def test_storage_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the ownership cannot be determined, nothing is committed."""
    files = open_files(tmp_path)
    owned = ownership._win(files, silent, HERE, PATIENT)
    runs.create_run(files, job=None, seed=0)
    names = type(files).names

    def fail(self: Files, folder: str = "") -> list[str]:
        if folder == FOLDER:
            raise OSError("no answer")
        return names(self, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(type(files), "names", fail)
    with pytest.raises(CheckpointError, match="no answer"):
        write(files, 1, owned)
    assert CheckpointStore(files, RUN).committed("step") == []


def test_process_description() -> None:
    process = Process("node-7", 123, "2026-11-26T10:00:00+00:00", "", "", -1, "", "", 0)
    assert str(process) == "process 123 on node-7 (started 2026-11-26T10:00:00+00:00)"
