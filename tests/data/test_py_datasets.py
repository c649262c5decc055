"""`PyDataset`s that change themselves and draw random numbers, as in Keras' own guides."""

from __future__ import annotations

import collections
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.data import python_sources  # noqa: E402
from keras_distplug.data.position import Positioned  # noqa: E402
from keras_distplug.python_state import object_states  # noqa: E402

EPOCHS, SAMPLES, BATCH = 3, 32, 8


class Data(keras.utils.PyDataset):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.x = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32")
        self.indices = np.arange(SAMPLES)
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x = self.noisy(self.x[self.indices[BATCH * index : BATCH * (index + 1)]])
        return x, x.sum(1, keepdims=True)

    def noisy(self, x: np.ndarray) -> np.ndarray:
        return x


class Shuffled(Data):
    def on_epoch_end(self) -> None:
        np.random.shuffle(self.indices)


class ShuffledByItself(Data):
    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.indices)


class List(Data):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.indices = list(range(SAMPLES))

    def on_epoch_end(self) -> None:
        random.shuffle(self.indices)


class Pairs(Data):
    """Shuffles a list that other code uses as the list of samples."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.samples = [(f"{number}.png", number) for number in range(SAMPLES)]
        self.cache: dict[int, np.ndarray] = {}  # not a state

    def on_epoch_end(self) -> None:
        random.shuffle(self.samples)
        self.indices = np.array([{sample: sample[1]}[sample] for sample in self.samples])

    def noisy(self, x: np.ndarray) -> np.ndarray:
        return self.cache.setdefault(len(self.cache), x)


class Large(Data):
    """Shuffles arrays that are kept only because they change."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.weights = np.arange(2**17, dtype="float64")

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.weights)

    def noisy(self, x: np.ndarray) -> np.ndarray:
        return x * np.float32(self.weights[0] / 2**17)


class Epochs(Data):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.epoch = 0

    def on_epoch_begin(self) -> None:
        self.epoch += 1

    def noisy(self, x: np.ndarray) -> np.ndarray:
        return x * np.float32(self.epoch)


class Noisy(Data):
    def noisy(self, x: np.ndarray) -> np.ndarray:
        return x + np.float32(np.random.normal() * random.random())


class NoisyByItself(Data):
    def noisy(self, x: np.ndarray) -> np.ndarray:
        return x + self.rng.normal(size=x.shape).astype("float32")


class Both(Shuffled, Noisy):
    pass


class NoisyAndShuffled(NoisyByItself, ShuffledByItself):
    pass


class Augment:
    __slots__ = ("calls", "rng")

    def __init__(self) -> None:
        self.rng, self.calls = np.random.default_rng(1), 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.calls += 1
        return x + (self.rng.normal(size=x.shape) * self.calls).astype("float32")


class Replay:
    def __init__(self) -> None:
        self.buffer: list[np.ndarray] = []
        self.latest: collections.deque[float] = collections.deque(maxlen=3)

    def mix(self, x: np.ndarray) -> np.ndarray:
        self.buffer.append(x)
        self.latest.append(float(x.mean()))
        return sum(self.buffer) * np.float32(1 + sum(self.latest))


replay = Replay()
order = random.Random(2)
generator = np.random.default_rng(4)
steps = 0


class Reaching(Data):
    """Depends on objects, a class, a closure and globals that are not its attributes."""

    epochs = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.augment = {"train": Augment()}
        self.priorities = np.ones(SAMPLES, "float32")
        self.file: Any = None
        drawn = np.random.default_rng(6)
        self.scale = lambda: np.float32(drawn.uniform())

    def on_epoch_end(self) -> None:
        Reaching.epochs += 1
        order.shuffle(self.order if hasattr(self, "order") else [])
        self.indices = generator.permutation(SAMPLES)

    def noisy(self, x: np.ndarray) -> np.ndarray:
        global steps
        steps += 1
        self.file = self.file or io.BytesIO()
        self.priorities[steps % SAMPLES] *= 2
        x = replay.mix(self.augment["train"](x)) * (self.scale() + steps + Reaching.epochs)
        return x * self.priorities[0] * np.float32(generator.normal() + order.random())


class ReachingFromBatches(Reaching):
    """Has no methods for epochs, so containers in its attributes are not inspected."""

    on_epoch_end = keras.utils.PyDataset.on_epoch_end


class Growing(Data):
    """Has more batches after every epoch, of which Keras reads as many as in the first one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.batches = 3

    def __len__(self) -> int:
        return self.batches

    def on_epoch_end(self) -> None:
        self.batches += 1
        self.rng.shuffle(self.indices)


def as_in_a_new_process() -> None:
    global replay, order, generator, steps
    replay, order, generator, steps = Replay(), random.Random(2), np.random.default_rng(4), 0
    Reaching.epochs = 0


CASES = {
    "reaches": (Reaching, {}),
    "grows": (Growing, {}),
    "reaches from batches": (ReachingFromBatches, {}),
    "validated by what reaches": (Noisy, {"validation": Reaching}),
    "in order": (Data, {}),
    "shuffled by Keras": (Data, {"shuffle": True}),
    "shuffles": (Shuffled, {}),
    "shuffles itself": (ShuffledByItself, {"shuffle": True}),
    "shuffles a list": (List, {}),
    "shuffles pairs": (Pairs, {}),
    "shuffles a large array": (Large, {}),
    "counts": (Epochs, {}),
    "draws": (Noisy, {}),
    "draws, shuffled by Keras": (Noisy, {"shuffle": True}),
    "draws itself": (NoisyByItself, {}),
    "shuffles and draws": (Both, {"shuffle": True}),
    "validated": (Data, {"validation": Both}),
    "validated alone": (Noisy, {"validation": NoisyAndShuffled}),
    "both shuffle": (Both, {"validation": Both}),
    "two workers": (Shuffled, {"workers": 2, "shuffle": True}),
}


class Draws(keras.callbacks.Callback):
    """Also draws from the global generators between epochs."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        np.random.random()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["drawn"] = np.random.random() + random.random()


class StopAtEnd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise small.Interrupted


def fit(name: str, *callbacks: keras.callbacks.Callback) -> tuple[list[bytes], object]:
    as_in_a_new_process()
    kind, given = CASES[name]
    given = dict(given)
    shuffle, validation = given.pop("shuffle", False), given.pop("validation", None)
    model = small.model()
    history = model.fit(
        kind(**given),
        epochs=EPOCHS,
        validation_data=validation and validation(),
        shuffle=shuffle,
        verbose=0,
        callbacks=[Draws(), *callbacks],
    )
    return small.state(model), history.history


def backup(folder: Path) -> keras.callbacks.Callback:
    return kd.BackupAndRestore(folder, save_freq=1, on_busy="wait", delete_checkpoint=False)


@pytest.mark.parametrize("name", CASES)
def test_interrupted(name: str, tmp_path: Path) -> None:
    """Uninterrupted, it trains like plain Keras; also if interrupted in an epoch, after its last
    batch or between epochs, and resumed."""
    plain = fit(name)
    assert fit(name, backup(tmp_path / "whole")) == plain
    stops = {"in": small.Stop(1, 2), "behind": StopAtEnd(), "between": small.Stop(2, 0)}
    for place, stop in stops.items():
        with pytest.raises(small.Interrupted):
            fit(name, backup(tmp_path / place), stop)
        assert fit(name, backup(tmp_path / place)) == plain, place


def test_retried_in_one_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The data's state after failed training is not the initial state of the next attempt."""

    def train(data: Reaching, folder: str, *callbacks: keras.callbacks.Callback) -> list[bytes]:
        model = small.model()
        given = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
        model.fit(data, **given, callbacks=[backup(tmp_path / folder), *callbacks])
        return small.state(model)

    as_in_a_new_process()
    whole = train(Reaching(), "whole")
    as_in_a_new_process()
    data = Reaching()
    with pytest.raises(small.Interrupted):
        train(data, "failed", small.Stop(0, 2))
    assert train(data, "failed") == whole
    assert "cannot be saved" not in caplog.text


class Collecting(Data):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.seen: list[object] = []
        self.keys = [{(0, 1): "a"}]
        self.cycle: list[Any] = []
        self.cycle.append(self.cycle)

    def noisy(self, x: np.ndarray) -> np.ndarray:
        self.seen.append({object()})
        return x


def test_unsavable_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small.model().fit(Collecting(), epochs=2, verbose=0, callbacks=[backup(tmp_path)])
    assert caplog.text.count("Collecting: `seen` (list) changes while batches are made") == 1


def test_too_large_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that changes and is too large to save is reported once; others are not."""
    announced: list[str] = []
    monkeypatch.setattr(python_sources, "announce", announced.append)
    monkeypatch.setattr(object_states, "MOST_BYTES", 2**19)
    monkeypatch.setattr(object_states, "SMALL_BYTES", 2**19)
    fit("shuffles a large array", backup(tmp_path))
    [only] = announced
    assert "`weights` changes during training, but is too large to save" in only


def test_draws_in_several_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Threads draw in another order every time, which is reported."""
    model = small.model()
    model.fit(Noisy(workers=2), epochs=1, verbose=0, callbacks=[backup(tmp_path)])
    assert "Noisy draws random numbers or changes its state while it makes batches" in caplog.text


def test_order_that_keras_draws() -> None:
    """Without a seed, Keras draws the order of a pass from Python's generator when the pass starts.
    A resumed pass keeps that order, whatever was drawn since."""

    def positioned(*, shuffle: bool) -> Positioned:
        return Positioned(python_sources.PyData(Data(), shuffle=shuffle, seed=None))

    def read(data: Positioned) -> list[bytes]:
        return [x.numpy().tobytes() for x, _ in data]

    random.seed(3)
    whole = positioned(shuffle=True)
    started_with = json.loads(json.dumps(whole.variables(in_pass=False)))
    expected, in_order = read(whole), read(positioned(shuffle=False))
    assert sorted(expected) == sorted(in_order)
    assert expected != in_order
    random.seed(4)
    resumed = positioned(shuffle=True)
    resumed.begin_at(0, 1, variables=started_with)
    assert read(resumed) == expected[1:]


def test_epochs_that_end_within_a_pass() -> None:
    """With `steps_per_epoch`, Keras 3.16 draws the next order from the epochs that have ended."""
    epochs = python_sources._Epochs(0)
    started = epochs.read()
    epochs.ended = 2
    for _ in range(2):  # the second time, within the same pass
        resumed = python_sources._Epochs(0)
        resumed.assign(epochs.read_in_pass(started), in_pass=True)
        assert (resumed.at_start, resumed.ended) == (0, 2)
        epochs = resumed
