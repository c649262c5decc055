"""Checkpoints that are written while a `fit` continues."""

from __future__ import annotations

import datetime
import errno
import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(300), pytest.mark.usefixtures("tried_once")]

import keras  # noqa: E402
import numpy as np  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.checkpoint import capture, saver  # noqa: E402
from keras_distplug.checkpoint.settings import Saving  # noqa: E402
from keras_distplug.cluster.channel import Channel  # noqa: E402
from keras_distplug.core.errors import CorruptCheckpointError, SaveError  # noqa: E402
from keras_distplug.storage.files import open_files  # noqa: E402
from keras_distplug.storage.retention import Retention  # noqa: E402
from keras_distplug.storage.store import CheckpointStore  # noqa: E402
from keras_distplug.storage.stores.local import LocalFiles  # noqa: E402

RUN = "run-0001"
Hook = Callable[[str], None]


@pytest.fixture
def before_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hook], None]:
    """Calls a function with the path of every file that is about to be written."""

    def install(hook: Hook) -> None:
        stock = LocalFiles.create

        def create(self: LocalFiles, path: str, parts: Iterable[bytes | memoryview]) -> None:
            hook(path)
            stock(self, path, parts)

        monkeypatch.setattr(LocalFiles, "create", create)

    return install


class AtStep(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls functions at the end of steps, which are counted from 1."""

    def __init__(self, actions: dict[int, Callable[[keras.Model], None]]) -> None:
        super().__init__()
        self.actions, self.step = actions, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        self.actions.get(self.step, lambda model: None)(self.model)


def fit(
    directory: Path, *callbacks: keras.callbacks.Callback, epochs: int = 3, **arguments: Any
) -> keras.Model:
    model = small.model()
    backup = kd.BackupAndRestore(directory, **{"delete_checkpoint": False, **arguments})
    model.fit(
        small.X,
        small.Y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[backup, *callbacks],
    )
    return model


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The result of an uninterrupted `fit`."""
    return small.state(fit(tmp_path_factory.mktemp("undisturbed")))


def store_in(directory: Path) -> CheckpointStore:
    return CheckpointStore(open_files(directory), RUN)


def steps_in(directory: Path) -> list[int]:
    """Returns the steps of the checkpoints. The last epoch's end is saved, too, if one is due at
    its last step."""
    return sorted({int(path.name.split("-")[1]) for path in (directory / RUN).glob("step-*")})


@pytest.mark.parametrize(
    ("settled", "saved", "told"),
    [
        (8, [2, 8, 10, 12], "2 scheduled checkpoints were skipped"),
        (6, [2, 6, 8, 10, 12], "1 scheduled checkpoint was skipped"),
    ],
    ids=["two", "one"],
)
def test_training_continues(
    settled: int,
    saved: list[int],
    told: str,
    tmp_path: Path,
    before_writing: Callable[[Hook], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A checkpoint holds the state after its step, although training continues meanwhile; saves
    that are due meanwhile are skipped, and counted."""
    gate, at_step_2 = threading.Event(), {}

    def hold(path: str) -> None:
        if path.startswith(f"{RUN}/step-00000002/"):
            assert gate.wait(60)

    def look(model: keras.Model) -> None:
        variables = capture.list_variables(model)
        at_step_2.update({key: np.array(variable.value) for key, variable in variables.items()})

    def settle(_: keras.Model) -> None:
        gate.set()
        saver.wait_for_all()

    before_writing(hold)
    actions = {2: look, **dict.fromkeys(range(settled, 13, 2), settle)}
    fit(tmp_path, AtStep(actions), save_freq=2, keep_last=9)
    stored = store_in(tmp_path).read("step-00000002")
    assert {key: stored.arrays[key].tobytes() for key in at_step_2} == {
        key: array.tobytes() for key, array in at_step_2.items()
    }
    assert steps_in(tmp_path) == saved
    assert told in caplog.text


def test_wait_if_busy(
    tmp_path: Path,
    before_writing: Callable[[Hook], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `on_busy="wait"`, none is skipped: training waits for the one in progress."""
    gate, waited = threading.Event(), []
    stock = saver.Saver.wait

    def wait(self: saver.Saver, timeout_s: float | None = None) -> None:
        if self.is_busy and not gate.is_set():
            waited.append(True)
            gate.set()
        stock(self, timeout_s)

    monkeypatch.setattr(saver.Saver, "wait", wait)
    before_writing(lambda path: None if "step-00000002/" not in path else _wait(gate))
    fit(tmp_path, save_freq=2, keep_last=9, on_busy="wait")
    assert waited
    assert steps_in(tmp_path) == list(range(2, 13, 2))


def _wait(gate: threading.Event) -> None:
    assert gate.wait(60)


@pytest.mark.parametrize(
    ("save_freq", "expected"),
    [
        ("epoch", [4, 8, 12]),
        (5, [5, 10, 12]),
        (False, []),
        ("2h", [12]),
        (datetime.timedelta(days=1), [12]),
        (datetime.timedelta(microseconds=1), list(range(1, 13))),
    ],
    ids=str,
)
def test_cadences(save_freq: Any, expected: list[int], tmp_path: Path) -> None:
    """Tests the steps of the checkpoints for every kind of cadence."""
    fit(tmp_path, save_freq=save_freq, keep_last=99, on_busy="wait")
    assert steps_in(tmp_path) == expected


def test_automatic(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`"auto"` reports the cost of a checkpoint and their interval."""
    fit(tmp_path, epochs=20, save_freq="auto", max_overhead=0.5)
    assert "a checkpoint costs training" in caplog.text
    assert store_in(tmp_path).newest("final") is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_save_that_fails(
    code: int,
    undisturbed: list[bytes],
    tmp_path: Path,
    before_writing: Callable[[Hook], None],
) -> None:
    """A failed save causes a warning, costs nothing else, and the next one is made."""
    failed = []

    def fail(path: str) -> None:
        if "step-00000004/" in path:
            failed.append(path)
            raise OSError(code, os.strerror(code), path)

    before_writing(fail)
    with pytest.warns(UserWarning, match=f"step 4 could not be written.*{os.strerror(code)}"):
        found = fit(tmp_path, on_busy="wait")
    assert len(failed) == 1
    assert small.state(found) == undisturbed
    assert steps_in(tmp_path) == [8, 12]


def test_storage_that_stays_broken(
    tmp_path: Path, before_writing: Callable[[Hook], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training ends with an error after `max_failed_saves`; earlier committed checkpoints
    remain."""
    expected = fit(tmp_path / "a", epochs=6)

    def fail(path: str) -> None:
        if "step-00000004/" not in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as broken:
        stock = LocalFiles.create

        def create(self: LocalFiles, path: str, parts: Iterable[bytes | memoryview]) -> None:
            if "RUN.json" not in path and ".owner/" not in path:
                fail(path)
            stock(self, path, parts)

        broken.setattr(LocalFiles, "create", create)
        with (
            pytest.warns(UserWarning, match="consecutive failures: 2"),
            pytest.raises(
                SaveError, match=r"checkpoints could not be written .*failures: 2.*No space"
            ),
        ):
            fit(tmp_path / "b", epochs=6, max_failed_saves=2, on_busy="wait")
    stored = store_in(tmp_path / "b").newest("step")
    assert stored is not None
    assert stored.manifest.cursor.step == 4
    assert small.state(fit(tmp_path / "b", epochs=6)) == small.state(expected)


def test_last_save_that_fails(tmp_path: Path, before_writing: Callable[[Hook], None]) -> None:
    """A `fit` whose end could not be recorded does not return as if it were."""

    def fail(path: str) -> None:
        if "/final-" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    before_writing(fail)
    with (
        pytest.warns(UserWarning, match="Saving a checkpoint failed"),
        pytest.raises(SaveError, match=r"step 12 could not be written.*No space"),
    ):
        fit(tmp_path)
    assert 12 in steps_in(tmp_path)


def test_retention(tmp_path: Path) -> None:
    """The best checkpoints by a metric and one per interval are kept, as well as the newest, of
    which Keras' `double_checkpoint` keeps one more."""
    model = fit(
        tmp_path,
        double_checkpoint=True,
        epochs=6,
        saving=Saving(on_busy="wait"),
        retention=Retention(keep_last=1, keep_every_steps=15, keep_best=("loss", "max", 2)),
    )
    losses = model.history.history["loss"]
    worst = sorted(range(6), key=losses.__getitem__)[-2:]
    assert steps_in(tmp_path) == sorted({16, 20, 24} | {4 * epoch + 4 for epoch in worst})


class Scores(small.Watching):
    """Adds a metric to the logs, best in the second epoch, whose weights it keeps."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["score"] = [3.0, 1.0, 2.0, 1.5, 4.0][epoch]
        if epoch == 1:
            self.weights = self.model.get_weights()


@pytest.mark.parametrize("save_freq", ["auto", "2h", 3, False])
def test_best_epoch(save_freq: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The end of the best epoch is saved, whenever else checkpoints are, and stays after a restart
    that trains worse epochs."""
    scores, best = Scores(), Retention(keep_last=1, keep_best=("score", "min", 1))
    with pytest.raises(small.Interrupted):
        fit(tmp_path, scores, small.Stop(3, 1), epochs=5, save_freq=save_freq, retention=best)
    small.start_process()
    fit(tmp_path, Scores(), epochs=5, save_freq=save_freq, retention=best)
    assert 8 in steps_in(tmp_path)
    backup = kd.BackupAndRestore(tmp_path, delete_checkpoint=False, retention=best)
    backup.export(tmp_path / "best.keras", step="best")
    for value, expected in zip(
        keras.models.load_model(tmp_path / "best.keras").get_weights(), scores.weights, strict=True
    ):
        assert np.array_equal(value, expected)
    assert "keep_best" not in caplog.text
    assert len(steps_in(tmp_path)) <= 2


def test_unknown_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, keep_best=("val_loss", "min", 1))
    assert "'val_loss', which the logs of the first epoch lack (they have loss, mae)" in caplog.text


@pytest.mark.parametrize("changed", [False, True])
def test_end_is_written_once(changed: bool, tmp_path: Path) -> None:
    """Training that ends in the state after its last step does not write that state again."""

    class AtEnd(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_end(self, logs: Any = None) -> None:
            if changed:
                self.model.layers[0].kernel.assign_add(np.ones((4, 8), "float32"))

    model = fit(tmp_path, AtEnd())
    step, final = (newest_file(tmp_path, f"{kind}-*/*/*.safetensors") for kind in ("step", "final"))
    assert step.samefile(final) is not changed
    stored = store_in(tmp_path).newest("final")
    assert stored is not None
    for key, value in capture.capture(model).items():
        assert np.array_equal(stored.arrays[key], value)


def newest_file(directory: Path, pattern: str) -> Path:
    return max((directory / RUN).glob(pattern), key=str)


@pytest.mark.parametrize("pattern", ["step-*/*/rank-0-1.safetensors", "step-*/MANIFEST.json"])
@pytest.mark.parametrize("harm", ["bit", "cut", "gone"])
def test_damage(pattern: str, harm: str, undisturbed: list[bytes], tmp_path: Path) -> None:
    """If a file of the newest checkpoint was changed, it is reported, training resumes from the
    previous one, and ends like an uninterrupted run. Without a manifest, a checkpoint does not
    exist."""
    with pytest.raises(small.Interrupted):
        fit(tmp_path, small.Stop(2, 1), on_busy="wait")
    saver.wait_for_all()
    path = newest_file(tmp_path, pattern)
    data = bytearray(path.read_bytes())
    if harm == "bit":
        data[len(data) // 2] ^= 1
    path.write_bytes(data if harm == "bit" else data[:-3])
    if harm == "gone":
        path.unlink()
    if path.name == "MANIFEST.json" and harm == "gone":
        found = fit(tmp_path)
    else:
        with pytest.warns(UserWarning, match=f"step-00000008 is quarantined: .*{path.name}"):
            found = fit(tmp_path)
    assert small.state(found) == undisturbed


def test_all_damaged(tmp_path: Path) -> None:
    """If all checkpoints are damaged, `fit` reports that before it trains, and leaves the model
    unchanged: damage may be found after most of a checkpoint has been loaded."""
    with pytest.raises(small.Interrupted):
        fit(tmp_path, small.Stop(2, 1), on_busy="wait")
    saver.wait_for_all()
    for path in (tmp_path / RUN).glob("step-*/*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    model = small.model()
    model.optimizer.build(model.trainable_variables)
    before = small.state(model)
    backup = kd.BackupAndRestore(tmp_path)
    with (
        pytest.warns(UserWarning, match="is quarantined"),
        pytest.raises(CorruptCheckpointError, match=r"step- are damaged.*resume=False"),
    ):
        model.fit(
            small.X, small.Y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[backup]
        )
    assert small.state(model) == before
    assert model.optimizer.iterations.numpy() == 0


def test_damage_that_another_worker_finds(
    undisturbed: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one worker cannot read a checkpoint completely, no worker restores it."""
    with pytest.raises(small.Interrupted):
        fit(tmp_path, small.Stop(2, 1), on_busy="wait")
    saver.wait_for_all()
    complaints = [json.dumps([True, "worker-1: a.safetensors has changed"]), None]
    asked = []

    def first_error(self: object, topic: str, complaint: str | None) -> str | None:
        if topic == "data":
            return complaint
        asked.append(complaint)
        return complaints.pop(0)

    monkeypatch.setattr(Channel, "first_error", first_error)
    with pytest.warns(
        UserWarning, match="step-00000008 is quarantined: .* worker-1: a.safetensors"
    ):
        found = fit(tmp_path)
    assert asked == [None, None]
    assert small.state(found) == undisturbed


def test_damaged_record(tmp_path: Path) -> None:
    """A run whose record is damaged is refused with a remedy, and nothing is changed."""
    fit(tmp_path)
    record = tmp_path / RUN / "RUN.json"
    record.write_text(record.read_text().replace('"seed": ', '"seed": 1'))
    before = {path: path.read_bytes() for path in tmp_path.glob("run-*/**/*") if path.is_file()}
    with pytest.raises(CorruptCheckpointError, match=r"RUN.json is damaged.*resume=False"):
        fit(tmp_path)
    assert before == {
        path: path.read_bytes() for path in tmp_path.glob("run-*/**/*") if path.is_file()
    }
