"""The checkpoints of a run."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import stamina
from checkpoints import RUN, Checkpoints
from forks import ending, kill_before, system_calls
from watched import WatchedFiles

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, SaveError
from keras_distplug.core.state import Completion, Cursor, TrainState
from keras_distplug.storage import codec
from keras_distplug.storage.manifest import SCHEMA_VERSION, VariableSpec
from keras_distplug.storage.memory import Memory
from keras_distplug.storage.sealed import compute_digest
from keras_distplug.storage.store import CheckpointStore, Stored
from keras_distplug.storage.stores.local import LocalFiles


def state(step: int, value: float | None = None, **changes: Any) -> TrainState:
    """Returns a state with arrays from `value`, by default `step`."""
    value = step if value is None else value
    arrays = {
        "model/z": np.full((3, 4), value, np.float32),
        "model/b": np.full(5, value, ml_dtypes.bfloat16),
        "model/c": np.full((2, 2), value * 1j, np.complex64),
        "optimizer/iterations": np.array(step, np.int64),
        "empty": np.zeros((0, 3), np.float16),
    }
    return TrainState(Cursor(epoch=1, batch=2, step=step), arrays, **changes)


def final(step: int, **changes: Any) -> TrainState:
    return state(step, completion=Completion(epochs=3, stopped_early=False), **changes)


def store(root: Path, keep_last: int = 2) -> Checkpoints:
    return Checkpoints(root, keep_last)


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root / RUN))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def holds(stored: Stored | None, expected: TrainState) -> bool:
    """True if `stored` equals `expected` bit for bit."""
    if stored is None or stored.manifest.cursor != expected.cursor:
        return False
    return list(stored.arrays) == list(expected.arrays) and all(
        (array.dtype, array.shape, array.tobytes()) == (other.dtype, other.shape, other.tobytes())
        for array, other in zip(stored.arrays.values(), expected.arrays.values(), strict=True)
    )


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(autouse=True)
def no_retries() -> Iterator[None]:
    stamina.set_testing(True, attempts=1)
    yield
    stamina.set_testing(False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


# Saving and reading


def test_imports_are_light() -> None:
    """The storage package imports neither TensorFlow nor Keras."""
    code = (
        "import sys, keras_distplug.storage.store\n"
        "print(sorted({'tensorflow', 'keras'} & set(sys.modules)), 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[] True\n"


UNREADABLE: dict[str, dict[str, Any]] = {
    "history": {"history": {"loss": 0.5}},
    "history_epochs": {"history_epochs": ("0",)},
    "metrics": {"metrics": {"f1": [0.5, 0.5]}},
    "other_logs": {"other_logs": {"when": {1, 2}}},
    "data": {"data": {"train": {"order": np.arange(3)}}},
    "stop_training": {"stop_training": 1},
    "how_built": {"how_built": [1]},
    "callbacks": {"callbacks": ({"callback": "Own", "state": {"own": object()}},)},
    "random": {"random": ("abc",)},
}


@pytest.mark.parametrize("field", UNREADABLE)
def test_unreadable_state_is_not_committed(root: Path, field: str) -> None:
    """A checkpoint that its reader would reject is not committed; the error names the value, and
    the older checkpoint is kept."""
    checkpoints = store(root, keep_last=1)
    checkpoints.save(state(4))
    saved = dataclasses.replace(state(5), **UNREADABLE[field])
    with pytest.raises(
        CheckpointError, match=r"stored as JSON|could not be read back|JSON would"
    ) as raised:
        checkpoints.save(saved)
    assert field in str(raised.value)
    assert holds(checkpoints.newest("step"), state(4))
    assert names(root)[-1] == "step-00000004"


def test_round_trip(root: Path) -> None:
    """A saved state is read back completely."""
    saved = state(
        7,
        history={"loss": [0.5, float("nan")]},
        history_epochs=(0, 1),
        metrics={"loss": 0.5},
        data={"epoch": 1, "seed": 2**40},
        stop_training=True,
    )
    store(root).save(saved)
    stored = store(root).newest("step")
    assert holds(stored, saved)
    assert stored is not None
    assert stored.name == "step-00000007"
    assert str(dict(stored.manifest.history)) == str(saved.history)
    assert stored.manifest.history_epochs == saved.history_epochs
    assert stored.manifest.data == saved.data
    assert stored.manifest.stop_training is True
    assert stored.manifest.completion is None
    assert stored.manifest.world_size == 1
    assert stored.manifest.metrics == {"loss": 0.5}
    assert stored.manifest.versions["keras"] == metadata.version("keras")


def test_one_value_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading needs memory for the current value, the previous one and a little that is read ahead,
    not for all values."""
    monkeypatch.setattr(codec, "AHEAD_BYTES", 2**16)
    arrays = {f"v{number}": np.full(200_000, number, np.float64) for number in range(9)}
    store(root).save(TrainState(Cursor(0, 0, 1), arrays))
    made: list[weakref.ref[np.ndarray]] = []

    def allocate(spec: VariableSpec) -> Memory:
        array = np.empty(spec.shape, spec.dtype)
        made.append(weakref.ref(array))
        return Memory(array, array.view(np.uint8).data)

    stored = store(root).newest("step")
    assert stored is not None
    most = 0
    for key, value in stored.values(allocate):
        assert np.array_equal(value, arrays[key])
        del value
        most = max(most, sum(each() is not None for each in made))
    assert len(made) == len(arrays)
    assert most <= 3


def test_read_once(root: Path) -> None:
    """Every byte of the chosen checkpoint is read once; no bytes of others are."""
    for step in (1, 2):
        store(root).save(state(step))
    counted = Counted(root)
    stored = CheckpointStore(counted, RUN).newest("step")
    assert stored is not None
    assert stored.manifest.cursor.step == 2
    assert dict(stored.values()).keys() == state(2).arrays.keys()
    newest = the_shard(root / RUN / "step-00000002")
    assert counted.bytes == {str(newest.relative_to(root)): newest.stat().st_size}


class Counted(LocalFiles):
    """Counts the bytes read per file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bytes: Counter[str] = Counter()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        count = super().read_into(path, offset, buffer)
        self.bytes[path] += count
        return count


@pytest.mark.parametrize("read_only", [False, True])
def test_quarantine(root: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool) -> None:
    """A checkpoint whose values turn out to be damaged is no longer the newest, even if that cannot
    be recorded."""
    for step in (1, 2):
        store(root).save(state(step))
    files = LocalFiles(root)
    opened = CheckpointStore(files, RUN)
    stored = opened.newest("step")
    assert stored is not None
    flip(the_shard(root / RUN / stored.name), -1)
    with pytest.raises(CorruptCheckpointError, match="has changed since it was written") as raised:
        list(stored.values())
    if read_only:
        monkeypatch.setattr(files, "create", refuse)
    with pytest.warns(UserWarning, match="step-00000002 is quarantined: .*has changed") as told:
        opened.quarantine(stored.name, raised.value)
    assert len(told) == 1 + read_only
    assert (root / RUN / stored.name / "DAMAGED.json").exists() is not read_only
    assert holds(opened.newest("step"), state(1))


def refuse(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_open_format(root: Path) -> None:
    """A checkpoint can be read without this package: it is JSON that names safetensors files."""
    saved = state(7)
    store(root).save(saved)
    folder = root / RUN / "step-00000007"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    [shard] = manifest["shards"]
    entries = dict(safetensors.deserialize((folder / shard["file"]).read_bytes()))
    for variable in manifest["variables"]:
        array = np.frombuffer(entries[variable["key"]]["data"], variable["dtype"])
        expected = saved.arrays[variable["key"]]
        assert (array.reshape(variable["shape"]) == expected).all()
    assert len(manifest["variables"]) == len(entries) == len(saved.arrays)
    assert (folder / shard["file"]).stat().st_size == shard["bytes"]


def test_empty_run(root: Path) -> None:
    """A run without checkpoints has no newest one, and asking creates nothing."""
    assert store(root).newest("step") is None
    assert store(root).newest("final") is None
    assert not root.exists()


def test_kinds(root: Path) -> None:
    """Checkpoints of runs in progress and of finished runs are kept apart."""
    for saved in (state(1), state(2), final(2, value=5), state(3)):
        store(root, keep_last=1).save(saved)
    assert names(root) == ["final-00000002", "step-00000003"]
    assert holds(store(root).newest("step"), state(3))
    newest = store(root).newest("final")
    assert holds(newest, final(2, value=5))
    assert newest is not None
    assert newest.manifest.completion == Completion(epochs=3, stopped_early=False)


def test_read_by_name(root: Path) -> None:
    """A checkpoint that is not the newest can be read by its name."""
    for step in (1, 2):
        store(root).save(state(step))
    assert holds(store(root).read("step-00000001"), state(1))


def test_foreign_files(root: Path) -> None:
    """A folder that is not a checkpoint's is neither read nor deleted."""
    for name in ("notes", "step-5", "step-00000009.bak", "astep-00000009", ".step-00000009"):
        (root / RUN / name).mkdir(parents=True)
        (root / RUN / name / "MANIFEST.json").write_text("mine")
    before = names(root)
    with no_warnings():
        for step in (1, 2, 3):
            store(root, keep_last=1).save(state(step))
        assert holds(store(root).newest("step"), state(3))
    assert names(root) == sorted([*before, "step-00000003"])


# Order


def test_newest_by_step(root: Path) -> None:
    """The newest checkpoint is that of the highest step, in whatever order they were saved."""
    for step in (3, 10, 9):
        store(root, keep_last=5).save(state(step))
    assert holds(store(root).newest("step"), state(10))


def test_many_steps(root: Path) -> None:
    """Steps with more digits than the padding of names are newer."""
    steps = (99_999_999, 100_000_000, 1_000_000_000_000)
    for step in steps:
        store(root, keep_last=2).save(state(step, value=step % 7))
        assert holds(store(root).newest("step"), state(step, value=step % 7))
    assert names(root) == ["step-100000000", "step-1000000000000"]


def test_keep_last(root: Path) -> None:
    """The newest `keep_last` are kept; the folders of others are deleted."""
    for step in range(1, 6):
        store(root, keep_last=3).save(state(step))
        assert len(names(root)) == min(step, 3)
    assert names(root) == ["step-00000003", "step-00000004", "step-00000005"]


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keep_none(root: Path, keep_last: int) -> None:
    """A retention that would keep nothing is refused before anything is written."""
    with pytest.raises(ValueError, match="keep_last"):
        store(root, keep_last)


@pytest.mark.parametrize(
    "other",
    [state(5, value=6), state(5, stop_training=True), state(5, history={"loss": [0.5]})],
    ids=["arrays", "stop_training", "nothing"],
)
def test_other_content(root: Path, other: TrainState) -> None:
    """Saving at an existing step creates a newer checkpoint alongside it."""
    first = state(5, history={"loss": [0.5]})
    store(root).save(first)
    before = contents(root)
    store(root).save(other)
    assert names(root) == ["step-00000005", "step-00000005-2"]
    assert contents(root).items() >= before.items()
    newest = store(root).newest("step")
    assert holds(newest, other)
    assert newest is not None
    assert newest.manifest.history == other.history
    assert newest.manifest.stop_training == other.stop_training


def test_repeats_in_order(root: Path) -> None:
    """If twelve checkpoints have the same step, the last one saved is the newest, before and after
    cleaning."""
    for value in range(12):
        store(root, keep_last=20).save(state(5, value=value))
    assert holds(store(root).newest("step"), state(5, value=11))
    assert "step-00000005-12" in names(root)
    store(root, keep_last=1).save(state(5, value=12))
    assert names(root) == ["step-00000005-13"]
    store(root, keep_last=1).save(state(5, value=13))
    assert names(root) == ["step-00000005-14"]
    assert holds(store(root).newest("step"), state(5, value=13))
    store(root, keep_last=1).save(state(6))
    assert names(root) == ["step-00000006"]


# Damage

Damage = Callable[[Path], Path]


def the_shard(folder: Path) -> Path:
    [shard] = folder.glob("*/rank-0-1.safetensors")
    return shard


def flip(file: Path, position: int) -> Path:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    return file


def cut(file: Path, length: int) -> Path:
    file.write_bytes(file.read_bytes()[:length])
    return file


def flip_text(folder: Path, text: str) -> Path:
    file = folder / "MANIFEST.json"
    return flip(file, file.read_text().index(text) + len(text) - 1)


def remove(file: Path) -> Path:
    file.unlink()
    return file


def spoil_text(folder: Path) -> Path:
    file = folder / "MANIFEST.json"
    file.write_bytes(b"\xff" + file.read_bytes()[1:])
    return file


DAMAGES: dict[str, Damage] = {
    "shard: length of its header": lambda folder: flip(the_shard(folder), 0),
    "shard: header": lambda folder: flip(the_shard(folder), 20),
    "shard: middle": lambda folder: flip(the_shard(folder), the_shard(folder).stat().st_size - 60),
    "shard: last byte": lambda folder: flip(the_shard(folder), -1),
    "shard: cut off": lambda folder: cut(the_shard(folder), 100),
    "shard: one byte short": lambda folder: cut(the_shard(folder), -1),
    "shard: empty": lambda folder: cut(the_shard(folder), 0),
    "shard: missing": lambda folder: remove(the_shard(folder)),
    "manifest: step": lambda folder: flip_text(folder, '"step": 3'),
    "manifest: key": lambda folder: flip_text(folder, '"nonce'),
    "manifest: schema": lambda folder: flip_text(folder, f'"schema_version": {SCHEMA_VERSION}'),
    "manifest: digest": lambda folder: flip(folder / "MANIFEST.json", -5),
    "manifest: no text": spoil_text,
    "manifest: cut off": lambda folder: cut(folder / "MANIFEST.json", 200),
    "manifest: empty": lambda folder: cut(folder / "MANIFEST.json", 0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged(root: Path, damage: Damage) -> None:
    """A damaged checkpoint is reported and quarantined permanently, and the previous one is
    used."""
    for step in (1, 2, 3):
        store(root, keep_last=3).save(state(step))
    folder = root / RUN / "step-00000003"
    file = damage(folder)
    before = contents(root)

    with pytest.warns(UserWarning, match=re.escape(str(file))) as warned:
        assert holds(store(root).newest("step"), state(2))
    assert len(warned) == 1
    note = json.loads((folder / "DAMAGED.json").read_text())
    assert str(file) in note["reason"]
    after = contents(root)
    assert after.items() >= before.items()
    assert after.keys() - before.keys() == {f"{RUN}/step-00000003/DAMAGED.json"}

    watched = WatchedFiles(LocalFiles(root))
    with no_warnings():
        assert holds(Checkpoints(watched).newest("step"), state(2))
    read = [path for method, path in watched.calls if method == "read"]
    assert read
    assert not [path for path in read if "step-00000003" in path]

    with no_warnings():
        for step in (3, 4, 5):
            store(root).save(state(step, value=10 + step))
            assert holds(store(root).newest("step"), state(step, value=10 + step))
    assert names(root) == ["step-00000003", "step-00000004", "step-00000005"]
    assert contents(folder) == {
        name.removeprefix(f"{RUN}/step-00000003/"): data
        for name, data in after.items()
        if "step-00000003" in name
    }


def test_save_next_to_damaged(root: Path) -> None:
    """Saving at the step of a damaged checkpoint creates another one; the damaged one is kept."""
    for step in (1, 2):
        store(root).save(state(step))
    flip(the_shard(root / RUN / "step-00000002"), -1)
    with pytest.warns(UserWarning, match="step-00000002 is quarantined"):
        store(root).newest("step")
    before = contents(root / RUN / "step-00000002")
    store(root).save(state(2))
    assert names(root) == ["step-00000001", "step-00000002", "step-00000002-2"]
    assert holds(store(root).newest("step"), state(2))
    assert contents(root / RUN / "step-00000002") == before


def test_save_next_to_undetected_damage(root: Path) -> None:
    """Saving at a step whose checkpoint was damaged since does not reuse that one."""
    store(root).save(state(2))
    flip(the_shard(root / RUN / "step-00000002"), -1)
    store(root).save(state(2))
    assert names(root) == ["step-00000002", "step-00000002-2"]
    assert holds(store(root).newest("step"), state(2))


def test_save_next_to_repaired(root: Path) -> None:
    """A quarantined checkpoint is not reused by a save, even if its bytes are correct."""
    store(root).save(state(1))
    folder = root / RUN / "step-00000001"
    LocalFiles(root).create(f"{RUN}/step-00000001/DAMAGED.json", [b"{}"])
    before = contents(folder)
    store(root).save(state(1))
    assert holds(store(root).newest("step"), state(1))
    assert contents(folder) == before


def test_length_is_reported(root: Path) -> None:
    """A truncated shard is reported with both lengths."""
    store(root).save(state(1))
    shard = the_shard(root / RUN / "step-00000001")
    whole = shard.stat().st_size
    cut(shard, whole - 5)
    with pytest.raises(
        CorruptCheckpointError, match=f"{shard} has only {whole - 5} of the {whole} bytes"
    ):
        store(root).verify("step-00000001")


def test_damaged_do_not_count(root: Path) -> None:
    """`keep_last` intact checkpoints are kept, regardless of the number of damaged ones."""
    store(root).save(state(1))
    for step in (2, 3, 4):
        store(root).save(state(step))
        flip(the_shard(root / RUN / f"step-0000000{step}"), -1)
        with pytest.warns(UserWarning, match="quarantined"):
            assert holds(store(root).newest("step"), state(1))
    store(root).save(state(5))
    assert names(root) == [f"step-0000000{step}" for step in (1, 2, 3, 4, 5)]
    store(root).save(state(6))
    assert names(root) == [f"step-0000000{step}" for step in (2, 3, 4, 5, 6)]


def test_all_damaged(root: Path) -> None:
    """If all checkpoints are damaged, every start is an error, and training never restarts
    automatically; checkpoints saved later are used."""
    for step in (1, 2):
        store(root).save(state(step))
        flip(the_shard(root / RUN / f"step-0000000{step}"), -1)
    with (
        pytest.warns(UserWarning, match="quarantined"),
        pytest.raises(CorruptCheckpointError, match="step-00000002, step-00000001") as first,
    ):
        store(root).newest("step")
    with no_warnings(), pytest.raises(CorruptCheckpointError) as second:
        store(root).newest("step")
    assert str(second.value) == str(first.value)
    assert "resume=False" in str(second.value)
    assert store(root).newest("final") is None
    store(root).save(state(3))
    assert holds(store(root).newest("step"), state(3))


def test_restored_from_a_copy(root: Path) -> None:
    """A checkpoint that was restored from a copy counts once its DAMAGED.json is deleted."""
    store(root).save(state(1))
    folder = root / RUN / "step-00000001"
    flip(the_shard(folder), -1)
    with pytest.warns(UserWarning, match="quarantined"), pytest.raises(CorruptCheckpointError):
        store(root).newest("step")
    flip(the_shard(folder), -1)
    (folder / "DAMAGED.json").unlink()
    assert holds(store(root).newest("step"), state(1))


def test_damage_that_cannot_be_recorded(root: Path) -> None:
    """On a read-only storage, a damaged checkpoint is skipped nevertheless."""
    for step in (1, 2):
        store(root).save(state(step))
    flip(the_shard(root / RUN / "step-00000002"), -1)
    watched = WatchedFiles(LocalFiles(root))
    watched.fail("create", "DAMAGED.json", OSError(errno.EROFS, "read-only"))
    with pytest.warns(UserWarning, match=r"step-00000002") as warned:
        assert holds(Checkpoints(watched).newest("step"), state(1))
    assert "is quarantined" in str(warned[0].message)
    assert "DAMAGED.json could not be written: " in str(warned[1].message)
    assert watched.fired == 1


def test_damage_recorded_by_another_process(root: Path) -> None:
    """Damage that two processes find at the same time is reported once by both of them."""
    for step in (1, 2):
        store(root).save(state(step))
    flip(the_shard(root / RUN / "step-00000002"), -1)
    watched = WatchedFiles(LocalFiles(root))
    watched.fail("create", "DAMAGED.json", FileExistsError(errno.EEXIST, "File exists"))
    with pytest.warns(UserWarning, match="step-00000002") as warned:
        assert holds(Checkpoints(watched).newest("step"), state(1))
    assert watched.fired == len(warned) == 1


def test_other_release(root: Path) -> None:
    """A checkpoint of another release is an error, not damage: it is left for its release."""
    for step in (1, 2):
        store(root).save(state(step))
    file = root / RUN / "step-00000002" / "MANIFEST.json"
    body = json.loads(file.read_text())
    del body["sha256"]
    body["schema_version"] = SCHEMA_VERSION + 1
    file.write_text(json.dumps({**body, "sha256": compute_digest(body)}))
    before = contents(root)
    with no_warnings(), pytest.raises(CheckpointError, match="release") as raised:
        store(root).newest("step")
    assert not isinstance(raised.value, CorruptCheckpointError)
    assert contents(root) == before


# Storage failures


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("read_into", "rank-0-1.safetensors"),
        ("read", "MANIFEST.json"),
        ("names", "step-00000002"),
        ("names", RUN),
    ],
)
@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), OSError(errno.EIO, "no")])
def test_unreadable(root: Path, method: str, part: str, error: OSError) -> None:
    """An unreadable file may be readable later: this is an error, and nothing is quarantined."""
    for step in (1, 2):
        store(root).save(state(step))
    before = contents(root)
    watched = WatchedFiles(LocalFiles(root))
    watched.fail(method, part, error)
    with no_warnings(), pytest.raises(CheckpointError, match=part) as raised:
        Checkpoints(watched).newest("step")
    assert not isinstance(raised.value, CorruptCheckpointError)
    assert raised.value.__cause__ is error
    assert watched.fired == 1
    assert contents(root) == before
    watched.mend()
    assert holds(Checkpoints(watched).newest("step"), state(2))


@pytest.mark.parametrize(
    ("method", "part"),
    [("create", "rank-0-1.safetensors"), ("create", "MANIFEST.json"), ("names", RUN)],
)
def test_failed_save(root: Path, method: str, part: str) -> None:
    """A save that fails raises SaveError and changes nothing; the next one succeeds."""
    for step in (1, 2):
        store(root).save(state(step))
    before = contents(root)
    watched = WatchedFiles(LocalFiles(root))
    saving = Checkpoints(watched)
    error = OSError(errno.ENOSPC, "No space left on device")
    watched.fail(method, part, error)
    with no_warnings(), pytest.raises(SaveError, match=r"step 3 .*No space left") as raised:
        saving.save(state(3))
    chain = [raised.value.__cause__, raised.value.__cause__ and raised.value.__cause__.__cause__]
    assert error in chain
    assert watched.fired == 1
    assert contents(root) == before
    watched.mend()
    assert holds(saving.newest("step"), state(2))
    assert holds(saving.read("step-00000001"), state(1))
    with no_warnings():
        saving.save(state(3))
    assert holds(saving.newest("step"), state(3))
    assert names(root) == ["step-00000002", "step-00000003"]


def test_failed_save_that_cannot_be_removed(root: Path) -> None:
    """The leftovers of a failed save are reported, do not count and are deleted later."""
    store(root).save(state(1))
    watched = WatchedFiles(LocalFiles(root))
    saving = Checkpoints(watched)
    watched.fail("create", "MANIFEST.json", OSError(errno.EIO, "broken"))
    watched.fail("delete", "step-00000002", OSError(errno.EIO, "broken"))
    with pytest.warns(UserWarning, match="files of a failed save"), pytest.raises(SaveError):
        saving.save(state(2))
    assert watched.fired == 2
    watched.mend()
    assert holds(saving.newest("step"), state(1))
    assert names(root) == ["step-00000001", "step-00000002"]
    for step in (3, 4):
        saving.save(state(step))
    assert names(root) == ["step-00000003", "step-00000004"]


def test_cleaning_of_leftovers(root: Path) -> None:
    """Leftovers of an interrupted save are deleted by later saves; those of a later step, whose
    save may still be in progress, are kept."""
    for step in (2, 4, 7):
        LocalFiles(root).create(f"{RUN}/step-0000000{step}/attempt/rank-0-1.safetensors", [b"half"])
    with no_warnings():
        for step in (1, 3, 5):
            store(root).save(state(step))
        assert holds(store(root).newest("step"), state(5))
    assert names(root) == ["step-00000003", "step-00000005", "step-00000007"]


def test_unserializable_state(root: Path) -> None:
    """A failed save of a state that cannot be written leaves no files behind."""
    with pytest.raises(SaveError, match="`history/loss/0`"):
        store(root).save(state(1, history={"loss": [np.float32(1)]}))
    assert contents(root) == {}


def test_failed_cleaning(root: Path) -> None:
    """If old checkpoints cannot be deleted, there is a warning; the new one is committed."""
    for step in (1, 2):
        store(root).save(state(step))
    watched = WatchedFiles(LocalFiles(root))
    watched.fail("delete", "step-00000001", OSError(errno.EIO, "broken"))
    with pytest.warns(UserWarning, match="could not be deleted: .*broken"):
        Checkpoints(watched).save(state(3))
    assert watched.fired == 1
    assert holds(store(root).newest("step"), state(3))
    store(root).save(state(4))
    assert names(root) == ["step-00000003", "step-00000004"]


def test_unreadable_successor(root: Path) -> None:
    """Nothing is deleted while the newest checkpoint cannot be read; there is a warning."""
    for step in (1, 2):
        store(root).save(state(step))
    before = contents(root)
    watched = WatchedFiles(LocalFiles(root))
    watched.fail("read", "step-00000003", OSError(errno.EIO, "broken"))
    with pytest.warns(UserWarning, match="were not deleted: .*broken"):
        Checkpoints(watched).save(state(3))
    assert watched.fired == 1
    assert contents(root).items() >= before.items()
    assert holds(store(root).newest("step"), state(3))


class Forgetful(LocalFiles):
    """A disk that reports success but writes other bytes."""

    wrong = True

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        if self.wrong and path.endswith(".safetensors"):
            parts = [b"".join(parts)[:-1] + b"?"]
        super().create(path, parts)


def test_storage_that_corrupts(root: Path) -> None:
    """If a checkpoint that is about to replace old ones reads back wrong, the save fails: it is
    quarantined, the old ones are kept, and the next save succeeds."""
    for step in (1, 2):
        store(root).save(state(step))
    before = contents(root)
    files = Forgetful(root)
    saving = Checkpoints(files)
    with (
        pytest.warns(UserWarning, match="step-00000003 is quarantined"),
        pytest.raises(SaveError, match=r"rank-0-1\.safetensors has changed"),
    ):
        saving.save(state(3))
    assert contents(root).items() >= before.items()
    assert holds(saving.newest("step"), state(2))
    files.wrong = False
    saving.save(state(3))
    assert holds(saving.newest("step"), state(3))


# Kills


def test_kill_at_every_call_of_a_save(tmp_path: Path) -> None:
    """A process that is killed at any system call of a save leaves the old or the new checkpoint as
    the newest, intact; saves continue, and no leftovers remain."""
    template = tmp_path / "template"
    for step in (1, 2):
        store(template).save(state(step))
    # Leftovers of an earlier kill, which this save also deletes.
    LocalFiles(template).create(f"{RUN}/step-00000001-2/cut-off/rank-0-1.safetensors", [b"half"])

    newest_after = []
    for number in itertools.count(1):
        root = shutil.copytree(template, tmp_path / str(number))

        def save(root: Path = root, number: int = number) -> None:
            kill_before(number)
            store(root).save(state(3))

        ended = ending(save)
        with no_warnings():
            newest = store(root).newest("step")
            assert newest is not None
            newest_after.append(newest.manifest.cursor.step)
            assert holds(newest, state(newest_after[-1]))
            for name in names(root):
                if (root / RUN / name / "MANIFEST.json").exists():
                    store(root).verify(name)
            for step in (3, 4, 5):
                store(root).save(state(step))
                assert holds(store(root).newest("step"), state(step))
        assert names(root) == ["step-00000004", "step-00000005"]
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        assert os.listdir(root) == [RUN]
        shutil.rmtree(root)
    root = shutil.copytree(template, tmp_path / "once")
    calls = system_calls(lambda: store(root).save(state(3)))
    commit = [index for index, call in enumerate(calls) if call == "link"][-1]
    assert newest_after == [2] * (commit + 1) + [3] * (len(calls) - commit)
    assert calls.count("link") == 2
    assert calls[commit:].count("rmdir") >= 2


def test_many_kills_of_one_save(root: Path) -> None:
    """A run that is killed again and again while it saves a step keeps its checkpoint, and one
    undisturbed save is enough to continue."""
    store(root).save(state(1))
    for number in itertools.count(1):

        def save(number: int = number) -> None:
            kill_before(number)
            store(root).save(state(2))

        ended = ending(save)
        if holds(store(root).newest("step"), state(2)):
            break
        assert ended == -signal.SIGKILL
        assert holds(store(root).newest("step"), state(1))
    assert number > 20
    for step in (3, 4):
        store(root).save(state(step))
    assert names(root) == ["step-00000003", "step-00000004"]


def test_kill_during_quarantine(tmp_path: Path) -> None:
    """A process that is killed at any point while it finds damage leaves the previous checkpoint to
    be found."""
    template = tmp_path / "template"
    for step in (1, 2):
        store(template).save(state(step))
    flip(the_shard(template / RUN / "step-00000002"), -1)
    for number in itertools.count(1):
        root = shutil.copytree(template, tmp_path / str(number))

        def find(root: Path = root, number: int = number) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kill_before(number)
                store(root).newest("step")

        ended = ending(find)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert holds(store(root).newest("step"), state(1))
        assert (root / RUN / "step-00000002" / "DAMAGED.json").exists()
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert number > 20
