"""Several `fit`s of one script in a directory: every one has its own run; a restart repeats
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.one_process]

import keras  # noqa: E402
import numpy as np  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.checkpoint import saver  # noqa: E402

Callbacks = list[keras.callbacks.Callback]
Script = Callable[[Callbacks], keras.Model]


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    start_process()
    yield
    start_process()


def start_process() -> None:
    """Does the same as `small.start_process`, with the seed that the script sets."""
    small.start_process()
    keras.utils.set_random_seed(5)


class StopAtStep(small.Watching):
    """Interrupts a script once, after a number of batches of all its `fit`s."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        self._left -= 1
        if self._left == 0:
            raise small.Interrupted


class Counts(keras.callbacks.Callback):
    """Has a state that changes in every `fit`, and is not reset."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(round(float(logs["loss"]), 6))
        self.model.layers[-1].bias.assign_add([0.01 * len(self.epochs)])


def fit(model: keras.Model, callbacks: Callbacks, epochs: int = 1, **given: Any) -> list[float]:
    history = model.fit(
        small.X, small.Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks, **given
    )
    found: list[float] = history.history["loss"]
    return found


def loop(callbacks: Callbacks) -> keras.Model:
    """Trains one epoch per `fit`, and draws numbers in between."""
    model = small.model()
    losses = []
    for _ in range(4):
        losses += fit(model, callbacks)
        model.optimizer.learning_rate = float(np.random.uniform(0.001, 0.01))
    assert len(losses) == 4
    return model


def phases(callbacks: Callbacks) -> keras.Model:
    """Fine-tunes with other layers, another optimizer."""
    model = small.model()
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    fit(model, callbacks, 2)
    model.layers[0].trainable = True
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    fit(model, callbacks, 2)
    return model


def models(callbacks: Callbacks) -> keras.Model:
    """A second model learns the first one's predictions."""
    teacher = small.model()
    fit(teacher, callbacks, 2)
    inputs = keras.Input((4,))
    student = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    student.compile("adam", "mse")
    targets = teacher.predict(small.X, verbose=0)
    student.fit(small.X, targets, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    return student


SCRIPTS: dict[str, Script] = {"loop": loop, "phases": phases, "models": models}


def backups(folder: Path) -> Callbacks:
    saving = kd.Saving(on_busy="wait")
    return [kd.BackupAndRestore(folder, 2, delete_checkpoint=False, saving=saving)]


def weights(model: keras.Model) -> list[bytes]:
    return [np.asarray(each.value).tobytes() for each in model.weights]


@pytest.mark.parametrize("script", SCRIPTS)
def test_interrupted(script: str, tmp_path: Path) -> None:
    """Without interruption, the script trains like plain Keras; interrupted in a later `fit`, a
    restart ends as if uninterrupted."""
    plain = weights(SCRIPTS[script]([Counts()]))
    start_process()
    assert weights(SCRIPTS[script]([*backups(tmp_path / "a"), Counts()])) == plain
    start_process()
    stop = StopAtStep(11)  # in the third epoch
    with pytest.raises(small.Interrupted):
        SCRIPTS[script]([*backups(tmp_path / "b"), Counts(), stop])
    assert stop.batches == 11
    start_process()
    count = StopAtStep(-1)
    assert weights(SCRIPTS[script]([*backups(tmp_path / "b"), Counts(), count])) == plain
    assert count.batches == 16 - 10
    start_process()
    nothing = StopAtStep(-1)
    assert weights(SCRIPTS[script]([*backups(tmp_path / "b"), Counts(), nothing])) == plain
    assert nothing.batches == 0


def test_same_process(tmp_path: Path) -> None:
    """A `fit` that failed is resumed by the next one of its process, as in a notebook; one after a
    finished `fit` continues training, as in plain Keras."""
    expected = small.model()
    fit(expected, [], 2)
    fit(expected, [], 2)
    start_process()
    model, callbacks, stop = small.model(), backups(tmp_path), StopAtStep(6)
    with suppress(small.Interrupted):
        fit(model, [*callbacks, stop], 2)
    saver.wait_for_all()
    fit(model, [*callbacks, stop], 2)
    assert stop.batches == 6 + 4  # from the checkpoint of step 4 on
    fit(model, [*callbacks, stop], 2)
    assert stop.batches == 10 + 8
    assert weights(model) == weights(expected)
    assert sorted(path.name for path in tmp_path.glob("run-*")) == ["run-0001", "run-0002"]


def test_more_epochs(tmp_path: Path) -> None:
    """Given more epochs, the `fit` of another process continues."""
    # The second one starts again, because the run that it continues was trained further.
    for epochs, trained in ((1, 8), (2, 4 + 8), (2, 0)):
        start_process()
        model, count = small.model(), StopAtStep(-1)
        callbacks = [*backups(tmp_path), count]
        fit(model, callbacks, epochs)
        fit(model, callbacks, epochs)
        assert count.batches == trained


def test_from_scratch(tmp_path: Path) -> None:
    """`resume=False` starts a new sequence, which the next start continues."""
    for resume, runs in ((True, 2), (False, 4), (True, 4)):
        start_process()
        model = small.model()
        for _ in range(2):
            fit(model, [kd.BackupAndRestore(tmp_path, delete_checkpoint=False, resume=resume)])
        assert len(list(tmp_path.glob("run-*"))) == runs


def test_failed_fit_after_a_deleted_run(tmp_path: Path) -> None:
    """A failed `fit` is resumed by the next one of its process, even if its run has the number of
    the deleted one."""
    model, stop = small.model(), StopAtStep(7)
    backup = {"save_freq": 2, "saving": kd.Saving(on_busy="wait")}
    fit(model, [kd.BackupAndRestore(tmp_path, **backup), stop])
    for _ in range(2):
        with suppress(small.Interrupted):
            fit(model, [kd.BackupAndRestore(tmp_path, **backup), stop])
        saver.wait_for_all()
    assert stop.batches == 7 + 2  # from the checkpoint of its second step on


def test_resume_false_after_an_interruption(tmp_path: Path) -> None:
    """In a notebook, `resume=False` starts from scratch even after an interrupted `fit`."""
    model, stop = small.model(), StopAtStep(7)
    for _ in range(3):
        with suppress(small.Interrupted):
            backup = kd.BackupAndRestore(tmp_path, 1, delete_checkpoint=False, resume=False)
            fit(model, [backup, stop])
        saver.wait_for_all()
    assert stop.batches == 7 + 4
    assert len(list(tmp_path.glob("run-*"))) == 3


def test_run_of_another_script_between(tmp_path: Path) -> None:
    """A start with `resume=False` that left no checkpoint does not break the sequence of another
    script."""
    model = small.model()
    for _ in range(2):
        fit(model, backups(tmp_path))
    start_process()
    with suppress(small.Interrupted):
        callbacks = [kd.BackupAndRestore(tmp_path, False, resume=False), StopAtStep(1)]
        fit(small.model(), callbacks)
    for trained in (4, 0):
        start_process()
        again, count = small.model(), StopAtStep(-1)
        for _ in range(3):
            fit(again, [*backups(tmp_path), count])
        assert count.batches == trained


def test_export_after_a_restart(tmp_path: Path) -> None:
    """A script that exports after every `fit` exports the same after a restart."""
    for _ in range(2):
        start_process()
        model = small.model()
        [backup] = callbacks = backups(tmp_path)
        fit(model, callbacks)
        backup.export(tmp_path / "first.safetensors", overwrite=True)
        first = (tmp_path / "first.safetensors").read_bytes()
        fit(model, callbacks)
        backup.export(tmp_path / "second.safetensors", overwrite=True)
        assert (tmp_path / "second.safetensors").read_bytes() != first
    assert (tmp_path / "first.safetensors").read_bytes() == first


def test_deleted_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `delete_checkpoint=True`, a restart cannot skip finished `fit`s: it says so, and trains
    all of them."""
    model, stop = small.model(), StopAtStep(7)
    fit(model, [kd.BackupAndRestore(tmp_path, 2), stop])
    with pytest.raises(small.Interrupted):
        fit(model, [kd.BackupAndRestore(tmp_path, 2), stop])
    start_process()
    again, count = small.model(), StopAtStep(-1)
    for _ in range(2):
        fit(again, [kd.BackupAndRestore(tmp_path, 2), count])
    assert count.batches == 8
    assert "number 2 of a script, but the runs of its earlier `fit` calls no" in caplog.text
