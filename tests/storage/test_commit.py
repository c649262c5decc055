"""Workers that write a checkpoint together."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import stamina
from checkpoints import RUN
from watched import WatchedFiles

from keras_distplug.core.errors import (
    AgreementError,
    CheckpointError,
    CorruptCheckpointError,
    SaveError,
)
from keras_distplug.core.state import Completion, Cursor, TrainState
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.files import Traits
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.stores.local import LocalFiles


class Board:
    """The messages between the workers."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}
        self._news = threading.Condition()

    def send(self, topic: str, text: str) -> None:
        with self._news:
            assert topic not in self._said, topic
            self._said[topic] = text
            self._news.notify_all()

    def receive(self, topic: str, timeout_s: float) -> str:
        with self._news:
            if not self._news.wait_for(lambda: topic in self._said, timeout_s):
                raise AgreementError(f"waited {timeout_s} s for {topic}")
            return self._said[topic]

    def forget(self, topic: str) -> None:
        with self._news:
            for each in [each for each in self._said if f"{each}/".startswith(f"{topic}/")]:
                del self._said[each]


Files = Callable[[int], Any]


class Workers:
    """Threads that save together.

    Args:
        files_of: Returns the files as seen by a worker.
        count: The number of workers.

    """

    def __init__(self, files_of: Files, count: int, timeout_s: float = 30.0) -> None:
        board = Board()
        self._writers = [
            Writer(
                files_of(rank),
                CheckpointStore(files_of(rank), RUN),
                Team(rank, count, board, timeout_s),
            )
            for rank in range(count)
        ]

    def save(
        self,
        state: TrainState,
        attempt: str,
        absent: int | None = None,
        differing: Mapping[int, TrainState] = MappingProxyType({}),
    ) -> Mapping[int, Exception | None]:
        """Saves on all workers that are not `absent`, and returns their errors."""

        def one(rank: int) -> Exception | None:
            try:
                self._writers[rank].save(differing.get(rank, state), attempt)
            except Exception as error:  # noqa: BLE001
                return error
            return None

        there = [rank for rank in range(len(self._writers)) if rank != absent]
        with ThreadPoolExecutor(len(there)) as threads:
            return dict(zip(there, threads.map(one, there), strict=True))


def state(step: int) -> TrainState:
    random = np.random.default_rng(step)
    arrays = {
        "model/a": random.normal(size=(33, 7)).astype("float32"),
        "model/b": random.integers(0, 9, 5).astype("int8"),
        "model/c": random.normal(size=(2, 3, 4)),
        "optimizer/iterations": np.array(step),
    }
    return TrainState(Cursor(epoch=0, batch=0, step=step), arrays)


def is_whole(root: Path, step: int) -> bool:
    stored = CheckpointStore(LocalFiles(root), RUN).newest("step")
    return stored is not None and all(
        np.array_equal(stored.arrays[key], value) for key, value in state(step).arrays.items()
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def two_attempts() -> Iterator[None]:
    stamina.set_testing(True, attempts=2)
    yield
    stamina.set_testing(False)


def failing(
    root: Path, which: int, method: str, part: str, error: OSError
) -> tuple[Files, WatchedFiles]:
    """Returns files that fail on worker `which`."""
    watched = WatchedFiles(LocalFiles(root))
    watched.fail(method, part, error)
    return lambda rank: watched if rank == which else LocalFiles(root), watched


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
def test_together(count: int, root: Path) -> None:
    """Every worker writes a separate file, and any number of workers can read them."""
    workers = Workers(lambda rank: LocalFiles(root), count)
    for step in (1, 2, 3):
        assert set(workers.save(state(step), f"a-{step}").values()) == {None}
        assert is_whole(root, step)
    assert sorted(path.name for path in (root / RUN).iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
    sizes = [path.stat().st_size for path in (root / RUN).glob("step-00000003/a-3/*")]
    assert len(sizes) == count
    arrays = sum(np.asarray(value).nbytes for value in state(3).arrays.values())
    # A header names up to four variables.
    assert max(sizes) - min(sizes) <= 4 * 128
    assert max(sizes) <= arrays / count + 8 + 4 * 128


@pytest.mark.parametrize("count", [1, 3])
def test_large_shares(count: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large share is split into several files of equal size; one that fails is written again."""
    monkeypatch.setattr(LocalFiles, "traits", Traits(100, at_once=1, is_near=True))
    arrays = sum(np.asarray(value).nbytes for value in state(1).arrays.values())
    files, watched = failing(root, 0, "create", "rank-0-3", OSError(errno.EIO, "no"))
    watched.mend_after(1)
    assert set(Workers(files, count).save(state(1), "a-1").values()) == {None}
    assert watched.fired == 1
    stored = CheckpointStore(LocalFiles(root), RUN).newest("step")
    assert stored is not None
    each = -(-arrays // (count * 100))
    assert [shard.file for shard in stored.manifest.shards] == [
        f"a-1/rank-{rank}-{number}.safetensors"
        for rank in range(count)
        for number in range(1, each + 2 - bool(rank))
        if (rank, number) != (0, 3)
    ]
    assert is_whole(root, 1)
    flip = root / RUN / stored.name / stored.manifest.shards[-1].file
    flip.write_bytes(flip.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptCheckpointError, match=flip.name):
        is_whole(root, 1)


class Case(NamedTuple):
    changed: bool = False  # by the end of training
    error: OSError | None = None
    is_done: bool = False  # before the error
    copied: bool = True


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(changed=True, copied=False),
        Case(error=OSError(errno.EPERM, "this storage has no links"), copied=False),
        Case(error=FileNotFoundError(errno.ENOENT, "it was deleted"), copied=False),
        Case(error=FileExistsError(errno.EEXIST, "the reply was lost"), is_done=True, copied=False),
    ],
)
def test_final_state_equals_last_step(case: Case, root: Path) -> None:
    """Bytes that the last save wrote are not written again if they are the same and the storage can
    copy."""
    watched = [WatchedFiles(LocalFiles(root)) for _ in range(2)]
    for each in watched:
        if case.error is not None:
            fails = each.lose_reply if case.is_done else each.fail
            fails("copy", "step-00000003", case.error)
    workers = Workers(lambda rank: watched[rank], 2)
    for step in (2, 3):
        assert set(workers.save(state(step), f"a-{step}").values()) == {None}
    end = replace(state(3), completion=Completion(1, stopped_early=False))
    if case.changed:
        end.arrays["model/a"][[0, -1]] += 1
    for each in watched:
        each.calls.clear()
    assert set(workers.save(end, "a-end").values()) == {None}
    stored = CheckpointStore(LocalFiles(root), RUN).newest("final")
    assert stored is not None
    for key, value in end.arrays.items():
        assert np.array_equal(stored.arrays[key], value)
    written = [path for each in watched for method, path in each.calls if method == "create"]
    assert sum("safetensors" in path for path in written) == (0 if case.copied else 2)
    for rank, shard in enumerate(stored.manifest.shards):
        there = root / RUN / stored.name / shard.file
        before = next((root / RUN / "step-00000003").rglob(f"rank-{rank}-*"))
        assert there.samefile(before) is case.copied
    # The final checkpoint stays when the last step's is deleted.
    CheckpointStore(LocalFiles(root), RUN).delete("step-00000003")
    CheckpointStore(LocalFiles(root), RUN).verify(stored.name)


def test_step_checkpoints_are_not_copied(root: Path) -> None:
    """Only the final checkpoint shares bytes: one damaged file must not affect two step
    checkpoints."""
    watched = WatchedFiles(LocalFiles(root))
    workers = Workers(lambda rank: watched, 1)
    for attempt in ("a-1", "a-2"):
        assert set(workers.save(state(1), attempt).values()) == {None}
    assert "copy" not in dict(watched.calls)
    assert is_whole(root, 1)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_failed_share(which: int, root: Path) -> None:
    """If one worker cannot write, no checkpoint is created, all workers get the reason, and no
    leftovers remain; the next save succeeds."""
    error = OSError(errno.ENOSPC, "No space left on device")
    files, watched = failing(root, which, "create", f"rank-{which}", error)
    workers = Workers(files, 3)
    found = workers.save(state(2), "a-2")
    for outcome in found.values():
        assert isinstance(outcome, SaveError)
        assert "step 2" in str(outcome)
        assert "No space left" in str(outcome)
        assert str(outcome).endswith("Free disk space, or raise the quota.")
    assert watched.fired == 2
    assert not [path for path in root.rglob("*") if path.is_file()]
    watched.mend()
    assert set(workers.save(state(3), "a-3").values()) == {None}
    assert is_whole(root, 3)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "full"), "Free disk space, or raise the quota."),
        (OSError(errno.EDQUOT, "full"), "Free disk space, or raise the quota."),
        (PermissionError(errno.EACCES, "no"), "Check the permissions of the directory."),
        (OSError(errno.EROFS, "no"), "Check the permissions of the directory."),
        (OSError("an answer of the store's"), "Fix the storage."),
        (FileExistsError("another's"), "Give every training job its own directory."),
        (CheckpointError("Worker 1 has another model."), ""),
    ],
)
def test_remedies(
    error: Exception, remedy: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error names the remedy."""
    watched = WatchedFiles(LocalFiles(root))
    watched.fail("create", "MANIFEST.json", error)
    monkeypatch.setattr(watched, "read", lambda path: b"of another run")
    [outcome] = Workers(lambda rank: watched, 1).save(state(1), "a-1").values()
    assert isinstance(outcome, SaveError)
    assert str(outcome).endswith(f"resumes from the newest one. {remedy}".rstrip())


def test_temporary_failure(root: Path) -> None:
    """A storage failure that occurs once is retried."""
    error = OSError(errno.EIO, "no")
    files, watched = failing(root, 1, "create", "rank-1", error)
    watched.mend_after(1)
    assert set(Workers(files, 2).save(state(1), "a-1").values()) == {None}
    assert watched.fired == 1
    assert is_whole(root, 1)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("part", ["rank-1", "rank-0", "MANIFEST.json"])
def test_lost_reply(part: str, times: int, root: Path) -> None:
    """A storage that executes a request and then reports a timeout: if this happens once, the save
    succeeds; if it happens always, the save fails, or the checkpoint exists. It is never
    incomplete."""
    watched = WatchedFiles(LocalFiles(root))
    Workers(lambda rank: LocalFiles(root), 2).save(state(1), "a-1")
    watched.lose_reply("create", part, TimeoutError("no answer"))
    watched.mend_after(times)
    outcomes = set(map(type, Workers(lambda rank: watched, 2).save(state(2), "a-2").values()))
    assert watched.fired == (1 if part == "MANIFEST.json" else times)
    is_committed = times == 1 or part == "MANIFEST.json"
    assert outcomes == {type(None) if is_committed else SaveError}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_whole(root, 2 if is_committed else 1)


def test_lost_replies_only(root: Path) -> None:
    """If the reply to writing a manifest is lost, and the manifest cannot be read, the checkpoint
    stays intact."""
    watched = WatchedFiles(LocalFiles(root))
    watched.lose_reply("create", "MANIFEST.json", TimeoutError("no answer"))
    watched.fail("read", "MANIFEST.json", TimeoutError("no answer"))
    [outcome] = Workers(lambda rank: watched, 1).save(state(1), "a-1").values()
    assert isinstance(outcome, SaveError)
    assert is_whole(root, 1)


@pytest.mark.parametrize(("method", "part"), [("create", "MANIFEST.json"), ("names", RUN)])
def test_failing_first_worker(method: str, part: str, root: Path) -> None:
    """The workers that wait for the first one are notified of its failure."""
    files, watched = failing(root, 0, method, part, OSError(errno.EIO, "broken"))
    found = Workers(files, 3).save(state(1), "a-1")
    assert watched.fired
    for outcome in found.values():
        assert isinstance(outcome, SaveError)
        assert "broken" in str(outcome)
    assert not [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_absent_worker(absent: int, root: Path) -> None:
    """A worker that does not answer in time makes the save fail, and none of it counts."""
    Workers(lambda rank: LocalFiles(root), 3).save(state(1), "a-1")
    found = Workers(lambda rank: LocalFiles(root), 3, timeout_s=0.3).save(state(2), "a-2", absent)
    assert len(found) == 2
    for outcome in found.values():
        assert isinstance(outcome, SaveError)
    assert is_whole(root, 1)


def test_state_that_cannot_be_written(root: Path) -> None:
    """An invalid state is reported to all workers, too."""
    bad = TrainState(Cursor(0, 0, 1), {"x": np.zeros(9)}, data={"position": object()})
    found = Workers(lambda rank: LocalFiles(root), 2).save(bad, "a-1")
    for error in found.values():
        assert isinstance(error, SaveError)
        assert "`data/position` cannot be stored as JSON: Object of type object is not JSON" in str(
            error
        )


def test_leftovers_of_an_earlier_attempt(root: Path) -> None:
    """A save at a step whose earlier save was interrupted deletes the leftovers of that one."""
    files = LocalFiles(root)
    files.create(f"{RUN}/step-00000001/cut-off/rank-0-1.safetensors", [b"half"])
    assert set(Workers(lambda rank: files, 2).save(state(1), "a-1").values()) == {None}
    assert files.names(f"{RUN}/step-00000001") == ["MANIFEST.json", "a-1"]
    assert is_whole(root, 1)


def test_two_groups(root: Path) -> None:
    """Two groups that consider each other dead and save the same step leave one or two intact
    checkpoints."""
    for round_ in range(10):
        groups = [Workers(lambda rank: LocalFiles(root), 2) for _ in range(2)]
        saves = [
            partial(group.save, state(round_), f"group{number}-{round_}")
            for number, group in enumerate(groups)
        ]
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda save: save(), saves))
        assert any(set(one.values()) == {None} for one in found)
        assert is_whole(root, round_)


@pytest.mark.parametrize(
    "arrays",
    [{"callbacks/Own/x": np.zeros(9)}, {"model/c": np.zeros((2, 3, 5))}, {"model/c": None}],
)
def test_other_variables(root: Path, arrays: dict[str, Any]) -> None:
    """Shares of workers that save different variables are not combined to a checkpoint."""
    workers = Workers(lambda rank: LocalFiles(root), 2)
    changed = {**state(2).arrays, **arrays}
    other = replace(state(2), arrays={k: v for k, v in changed.items() if v is not None})
    assert not any(workers.save(state(1), "a-1").values())
    failures = workers.save(state(2), "a-2", differing={1: other})
    for failure in failures.values():
        assert "Expected all workers to save the same variables" in str(failure)
    assert is_whole(root, 1)
