"""Typical tutorial callbacks, without `state_dict()`: an interrupted run ends like an uninterrupted
one, and state that cannot be restored is reported."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import itertools
import logging
import math
import os
import queue
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402

Callback = keras.callbacks.Callback
Make = Callable[[Path], list[Callback]]
EPOCHS = 4


def set_rate(model: keras.Model, rate: float) -> None:
    model.optimizer.learning_rate.assign(rate)


class CosineWarmUp(Callback):
    def __init__(self, peak: float, warm_up: int, total: int) -> None:
        super().__init__()
        self.peak, self.warm_up, self.total = peak, warm_up, total
        self.step, self.rates = 0, []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        done = (self.step - self.warm_up) / (self.total - self.warm_up)
        rate = self.peak * 0.5 * (1 + math.cos(math.pi * done))
        if self.step < self.warm_up:
            rate = self.peak * (self.step + 1) / self.warm_up
        self.step += 1
        self.rates.append(rate)
        set_rate(self.model, rate)


class CyclicLR(Callback):
    def __init__(self, low: float, high: float, steps: float) -> None:
        super().__init__()
        self.low, self.high, self.steps = low, high, steps
        self.clr_iterations, self.trn_iterations = 0.0, 0.0
        self.history: dict[str, list[Any]] = {}

    def clr(self) -> float:
        cycle = np.floor(1 + self.clr_iterations / (2 * self.steps))
        x = np.abs(self.clr_iterations / self.steps - 2 * cycle + 1)
        return self.low + (self.high - self.low) * np.maximum(0, (1 - x))

    def on_train_begin(self, logs: Any = None) -> None:
        set_rate(self.model, self.low if self.clr_iterations == 0 else self.clr())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trn_iterations += 1
        self.clr_iterations += 1
        rate = float(self.model.optimizer.learning_rate.numpy())
        self.history.setdefault("lr", []).append(rate)
        self.history.setdefault("iterations", []).append(self.trn_iterations)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
        set_rate(self.model, self.clr())


class LRFinder(Callback):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = str(folder / "initial.weights.h5")

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.save_weights(self.path)
        self.avg_loss, self.best_loss, self.batch_num = 0.0, 1e9, 0
        self.losses, self.log_rates = [], []
        self.rate = 1e-4
        set_rate(self.model, self.rate)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batch_num += 1
        self.avg_loss = 0.9 * self.avg_loss + 0.1 * logs["loss"]
        smoothed = self.avg_loss / (1 - 0.9**self.batch_num)
        self.best_loss = min(self.best_loss, smoothed)
        self.losses.append(smoothed)
        self.log_rates.append(math.log10(self.rate))
        self.rate *= 1.3
        set_rate(self.model, self.rate)

    def on_train_end(self, logs: Any = None) -> None:
        self.model.load_weights(self.path)
        self.model.layers[0].kernel.assign_add(
            tf.fill(self.model.layers[0].kernel.shape, np.float32(self.best_loss))
        )


class SWA(Callback):
    """Averages weights from an epoch on, and uses the mean at the end."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def on_train_begin(self, logs: Any = None) -> None:
        self.swa_weights = None
        self.count = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.start:
            self.swa_weights = self.model.get_weights()
        elif epoch > self.start:
            self.count += 1
            for mean, new in zip(self.swa_weights, self.model.get_weights(), strict=True):
                mean += (new - mean) / (self.count + 1)

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.swa_weights)


class EMA(Callback):
    """Keeps averages in variables, which validation uses."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.averages = [tf.Variable(weight) for weight in self.model.weights]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for average, weight in zip(self.averages, self.model.weights, strict=True):
            average.assign(0.9 * average + 0.1 * tf.convert_to_tensor(weight))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            self.model.set_weights([average.numpy() for average in self.averages])


class BestN(Callback):
    """Keeps the files of the best epochs, and loads the best one at the end."""

    def __init__(self, folder: Path, n: int) -> None:
        super().__init__()
        self.folder, self.n = folder, n
        self.best: list[tuple[float, Path]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        path = self.folder / f"best-{epoch}.weights.h5"
        self.model.save_weights(path)
        # The worst counts as the best, so that it is an early one.
        self.best = sorted([*self.best, (-logs["loss"], path)])
        for _, worse in self.best[self.n :]:
            worse.unlink(missing_ok=True)
        del self.best[self.n :]

    def on_train_end(self, logs: Any = None) -> None:
        self.model.load_weights(self.best[0][1])


class EveryNBatches(Callback):
    def __init__(self, folder: Path, n: int) -> None:
        super().__init__()
        self.folder, self.n, self.seen, self.saved = folder, n, 0, collections.deque(maxlen=2)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        if self.seen % self.n == 0:
            self.saved.append(f"{self.folder}/{self.seen}.weights.h5")
            self.model.save_weights(self.saved[-1])
            set_rate(self.model, 0.01 / len(self.saved) / self.seen)


class LayerwiseUnfreezing(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = None

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if self.frozen is None:
            self.frozen = 2
            for layer in model.layers[: self.frozen]:
                layer.trainable = False
            model.compile("adam", "mse")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch and self.frozen:
            self.frozen -= 1
            self.model.layers[self.frozen].trainable = True
            self.model.compile(keras.optimizers.Adam(1e-2 / (1 + epoch)), "mse")
            self.model.make_train_function(force=True)


class TimeStopping(Callback):
    def __init__(self, limit_secs: float) -> None:
        super().__init__()
        self.limit_secs = limit_secs

    def on_train_begin(self, logs: Any = None) -> None:
        self.stopping_time = time.time() + self.limit_secs

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.time() >= self.stopping_time:
            self.model.stop_training = True


class KLAnnealing(Callback):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight, self.value = weight, 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.value = min(1.0, self.value + 0.07)
        self.weight.assign(self.value)


class GradientNorms(Callback):
    """Logs the norm of a step's update, from weights that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norms = None, np.zeros(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = np.concatenate([weight.ravel() for weight in self.model.get_weights()])
        if self.before is not None:
            self.norms = np.append(self.norms, np.linalg.norm(now - self.before))
        self.before = now

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["norm"] = float(self.norms.sum())


def annealed() -> list[Callback]:
    weight = keras.Variable(0.0)
    callback = KLAnnealing(weight)
    callback.loss = lambda y, p: (
        keras.ops.mean((y - p) ** 2, -1) * keras.ops.convert_to_tensor(weight)
    )
    return [callback]


TUTORIALS: dict[str, Make] = {
    "cosine warm-up": lambda folder: [CosineWarmUp(0.02, 5, 4 * EPOCHS)],
    "cyclical rate": lambda folder: [CyclicLR(1e-3, 1e-2, 3.0)],
    "learning-rate finder": lambda folder: [LRFinder(folder)],
    "SWA": lambda folder: [SWA(1)],
    "EMA": lambda folder: [EMA()],
    "best N": lambda folder: [BestN(folder, 2)],
    "every N batches": lambda folder: [EveryNBatches(folder, 3)],
    "layer-wise unfreezing": lambda folder: [LayerwiseUnfreezing()],
    "time stopping": lambda folder: [TimeStopping(1e6)],
    "KL annealing": lambda folder: annealed(),
    "gradient norms": lambda folder: [GradientNorms()],
}


class Meter:
    total, parts = 0.0, 0

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def add(self, value: float) -> None:
        self.total += value
        self.parts += 1
        self.seen.append({"part": self.parts})


class Slotted(Callback):
    __slots__ = ("n",)

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.n += 1
        set_rate(self.model, 0.01 / self.n)


class OfClass(Callback):
    n = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        type(self).n += 1
        set_rate(self.model, 0.01 / OfClass.n)


class WithMeters(Callback):
    """Counts in its own objects, also within lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.meters = Meter(), {"a": [Meter()]}
        self.namespace = types.SimpleNamespace(n=1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.meter.add(1.0)
        self.meters["a"][0].add(2.0)
        self.namespace.n += 1
        total = self.meter.total + self.meters["a"][0].total + len(self.meter.seen)
        set_rate(self.model, 0.01 / total / self.namespace.n)


class Patience(keras.callbacks.EarlyStopping):
    """Adds a counter to one of Keras' own callbacks."""

    def __init__(self) -> None:
        super().__init__("loss", patience=50, min_delta=0.1)
        self.n = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.n += 1
        set_rate(self.model, 0.01 / self.n)


class After(Callback):
    """Wraps another callback."""

    def __init__(self, inner: Callback) -> None:
        super().__init__()
        self.inner = inner

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self.inner.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self.inner.on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.inner.on_epoch_end(epoch, {"made_up": [5.0, 6.0, 7.0, 8.0][epoch]})


class Random(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rng, self.generator = np.random.default_rng(1), tf.random.Generator.from_seed(2)
        self.seeds = keras.random.SeedGenerator(3)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        drawn = self.rng.random() + float(self.generator.uniform([]))
        set_rate(self.model, 0.01 * (drawn + float(keras.random.uniform((), seed=self.seeds))))


class WithMetric(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.mean.update_state(batch)
        set_rate(self.model, 0.01 / (1 + float(self.mean.result())))


_steps = 0
_seen: list[int] = []


def count() -> int:
    global _steps
    _steps += 1
    return _steps


class Globals(Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        _seen.append(batch)
        set_rate(self.model, 0.01 / count() / len(_seen))


def enclosed() -> list[Callback]:
    n, parts = 0, []

    def begin(batch: int, logs: Any = None) -> None:
        nonlocal n
        n += 1
        parts.append(n)
        held.rate = 0.01 / n / len(parts)

    def end(batch: int, logs: Any = None, state: Any = [0]) -> None:  # noqa: B006
        state[0] += 1
        held.rate /= state[0]
        counted.n += 1
        set_rate(held.model, held.rate / counted.n)

    def counted() -> None:
        pass

    counted.n = 0
    held = keras.callbacks.LambdaCallback(
        on_train_batch_begin=begin, on_train_batch_end=functools.partial(end, state=[0])
    )
    return [held]


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


class OnModel(Callback):
    """Keeps its count in the model, in a module of the script and as a member of an enumeration."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase.WARM

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.seen = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.seen += 1
        small.counted += 1
        self.phase = Phase.COLD if self.model.seen > 4 else Phase.WARM
        set_rate(self.model, 0.1 / self.model.seen / small.counted / self.phase.value)


class MetersOfModel(Callback):
    """Keeps its objects in the model, directly and in containers, which Keras replaces with its
    own."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.meter, self.model.meters = Meter(), {"a": [Meter()]}
        self.model.rates = [1.0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.meter.add(1.0)
        self.model.meters["a"][0].add(2.0)
        self.model.rates.append(self.model.meter.total + self.model.meters["a"][0].parts)
        set_rate(self.model, 0.01 / sum(self.model.rates))


class Impatient(Callback):
    """Changes arguments of another callback."""

    def __init__(self, other: keras.callbacks.ReduceLROnPlateau) -> None:
        super().__init__()
        self.other = other

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.other.factor *= 0.5

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["made_up"] = [5.0, 6.0, 7.0, 8.0][epoch]


def impatient() -> list[Callback]:
    plateau = keras.callbacks.ReduceLROnPlateau("made_up", mode="min", patience=1)
    return [Impatient(plateau), plateau]


class Counted:
    """A schedule that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int, rate: float) -> float:
        self.calls += 1
        return rate / self.calls


class Record(NamedTuple):
    epoch: int
    loss: float


class AttrDict(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Odd(Callback):
    """Values of many types, some of which are objects that have other uses."""

    def __init__(self) -> None:
        super().__init__()
        self.phases, self.records = [Phase.WARM], [Record(0, 0.0)]
        self.by_name: Any = collections.defaultdict(lambda: collections.defaultdict(list))
        self.attributes, self.settings = AttrDict(n=0), argparse.Namespace(n=0)
        self.mixed = {"logger": logging.getLogger("x"), "n": 0}
        self.meters = collections.deque([Meter()])
        self.slow, self.kernel = False, None
        self.sizes = np.ones(2)
        self.rows, self.scalars = DATA[:2], [np.float32(1)] * 80

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial = self.best = [np.ones(2), np.ones(2)]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.slow = not self.slow
        self.rows = DATA[2 * epoch : 2 * epoch + 2]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.kernel is None:
            self.kernel = self.model.layers[0].kernel
        self.kernel.assign(self.kernel * 0.99)
        self.phases.append(Phase.COLD)
        self.records.append(Record(batch, float(batch)))
        self.by_name[str(batch)]["loss"].append(batch)
        self.attributes["n"] += 1
        self.settings.n += 1
        self.mixed["n"] += 1
        self.meters[0].add(1.0)
        self.scalars.append(np.float32(batch))
        self.best = [np.full(2, batch), np.ones(2)]
        seen = [
            *(len(self.phases), self.phases[-1].value, self.records[-1].loss, self.attributes.n),
            *(self.settings.n, self.mixed["n"], self.meters[0].total, len(self.scalars)),
            *(len(self.by_name["0"]["loss"]), float(self.best[0][0] + self.initial[0][0])),
            *(float(DATA.sum() + self.rows.sum()), 3 * self.slow),
        ]
        set_rate(self.model, 0.1 / (1 + sum(seen)))


class Halving(keras.callbacks.ReduceLROnPlateau):
    """Changes an argument of one of Keras' own callbacks."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, {"made_up": [5.0, 6.0, 7.0, 8.0][epoch]})
        self.factor *= 0.5


DATA = np.arange(16.0).reshape(8, 2)


class Lazy(Callback):
    """Creates averages when it first needs them."""

    averages: Any = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.averages is None:
            self.averages = [keras.Variable(weight) for weight in self.model.weights]
        for average, weight in zip(self.averages, self.model.weights, strict=True):
            average.assign((average + weight) / 2)
        self.model.set_weights([average.numpy() for average in self.averages])


def scheduled() -> list[Callback]:
    rates: list[float] = []

    def schedule(epoch: int, rate: float) -> float:
        rates.append(rate)
        return rate / len(rates)

    return [keras.callbacks.LearningRateScheduler(schedule)]


class Phased(Callback):
    """Has attributes that later refer to objects of other attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: Any = None
        self.phases = [Meter(), Meter()]
        self.current: list[float] = []
        self.best: Any = None
        self.array, self.chosen = np.zeros(2), np.ones(2)
        self.first = self.again = {"n": 0}
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches % 5 == 1:
            self.phase = self.phases[self.batches // 5 % 2]
            self.best, self.chosen = self.current, self.array
            self.again = self.first if self.batches % 2 else dict(self.first)
        self.phase.total += 1
        self.current.append(1.0)
        self.array += 1
        self.again["n"] += 1
        meters = self.phases[0].total + 10 * self.phases[1].total
        others = len(self.best) + self.chosen.sum() + self.first["n"]
        set_rate(self.model, 1e-4 * (meters + float(others)))


OTHERS: dict[str, Make] = {
    "references": lambda folder: [Phased()],
    "slots": lambda folder: [Slotted()],
    "class attribute": lambda folder: [OfClass()],
    "objects": lambda folder: [WithMeters()],
    "subclass": lambda folder: [Patience()],
    "wrapped": lambda folder: [
        After(
            keras.callbacks.ReduceLROnPlateau(
                "made_up", mode="min", patience=1, factor=0.3, min_delta=0.2
            )
        )
    ],
    "random": lambda folder: [Random()],
    "metric": lambda folder: [WithMetric()],
    "globals": lambda folder: [Globals()],
    "closures": lambda folder: enclosed(),
    "schedule": lambda folder: scheduled(),
    "attribute of the model": lambda folder: [OnModel()],
    "objects of the model": lambda folder: [MetersOfModel()],
    "argument of another": lambda folder: impatient(),
    "schedule object": lambda folder: [keras.callbacks.LearningRateScheduler(Counted())],
    "odd values": lambda folder: [Odd()],
    "changed argument": lambda folder: [Halving("made_up", mode="min", patience=1)],
    "made later": lambda folder: [Lazy()],
    "two of a class": lambda folder: [Slotted(), Slotted(), Patience()],
}


def fit(make: Make, folder: Path, *callbacks: Callback) -> Any:
    global _steps
    _steps, OfClass.n, small.counted = 0, 0, 0  # as in a new process
    _seen.clear()
    files = folder / "files"
    files.mkdir(parents=True, exist_ok=True)
    made = make(files)
    model = small.model()
    if hasattr(made[0], "loss"):
        model.compile("adam", made[0].loss)
    history = model.fit(
        small.X,
        small.Y,
        batch_size=8,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[*made, *callbacks],
    )
    return small.state(model), history.history, sorted(os.listdir(files))


def backup(directory: Path) -> Callback:
    return kd.BackupAndRestore(directory, save_freq=1, on_busy="wait", delete_checkpoint=False)


@pytest.mark.parametrize("name", [*TUTORIALS, *OTHERS])
def test_interrupted(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training ends with the weights, History and files of plain Keras, from within an epoch and
    after its last batch."""
    make = {**TUTORIALS, **OTHERS}[name]
    plain = fit(make, tmp_path / "plain")
    for place in [(1, 1), (2, 3)]:
        folder = tmp_path / str(place)
        with pytest.raises(small.Interrupted):
            fit(make, folder, backup(folder / "runs"), small.Stop(*place))
        assert fit(make, folder, backup(folder / "runs")) == plain, place
    messages = [each for each in caplog.messages if "cannot" in each]
    assert bool(messages) == (name == "time stopping"), messages


def config_only(folder: Path) -> list[Callback]:
    """Callbacks that hold only configuration, which does not change."""

    class Notifier(Callback):
        def __init__(self, url: str, **given: Any) -> None:
            super().__init__()
            self.url, self.given, self.threshold = url, given, np.float32(0.5)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert self.url

    class WithLogger(Notifier):
        def __init__(self) -> None:
            super().__init__("x")
            import logging

            self.logger = logging.getLogger("mine")

    class WithLock(Notifier):
        def __init__(self) -> None:
            super().__init__("x")
            import threading

            self.lock, self.event = threading.Lock(), threading.Event()

    class WithData(Notifier):
        def __init__(self) -> None:
            super().__init__("x")
            self.data = small.dataset()
            self.arrays = (small.X, small.Y)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["seen"] = self.model.evaluate(self.data, verbose=0)[0]

    class WithModel(Notifier):
        def __init__(self) -> None:
            super().__init__("x")
            self.teacher = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    class WithTime(Notifier):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert time.perf_counter() - self.started >= 0

    class WithLogs(Notifier):
        def on_train_begin(self, logs: Any = None) -> None:
            self.run = f"{time.time()}-{id(self)}"

    class WithFunction(Notifier):
        def __init__(self) -> None:
            super().__init__("x")
            self.function, self.bound = (lambda logs: logs), self.on_epoch_end

    class WithMemory(Notifier):
        @functools.cached_property
        def heavy(self) -> Path:
            return folder

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert self.heavy

    rows = folder / "rows"
    rows.write_text("a\n")
    reader = Notifier("x")
    reader.file = rows.open()
    plain = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    return [
        *(Notifier("x", a=[1, {"b": 2}]), WithLogger(), WithLock(), WithData(), WithModel()),
        *(WithTime("x"), WithLogs("x"), WithFunction(), WithMemory("x"), reader, plain),
        keras.callbacks.TerminateOnNaN(),
    ]


def test_configuration_causes_no_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Callbacks that hold only configuration cause no message, neither before nor after a restart,
    and nothing of them is in a checkpoint."""
    from keras_distplug.storage.files import open_files
    from keras_distplug.storage.store import CheckpointStore

    with pytest.raises(small.Interrupted):
        fit(config_only, tmp_path, backup(tmp_path / "runs"), small.Stop(1, 1))
    stored = CheckpointStore(open_files(tmp_path / "runs"), "run-0001").newest("step")
    assert stored is not None
    saved = [each for each in stored.manifest.callbacks if "changed" in each["state"]]
    fit(config_only, tmp_path, backup(tmp_path / "runs"))
    assert not [each for each in caplog.messages if "cannot" in each or "restart" in each]
    assert {each["callback"] for each in saved} <= {
        "<steps>",
        "WithMemory",
    }  # a path, once it was requested


class Opens(Callback):
    """Holds an object that cannot be saved from the start, and creates another one later."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.file, self.numbers = (folder / "log").open("w"), itertools.count()
        self.bar, self.is_open = None, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.n = next(self.numbers)
        if not self.is_open:
            self.bar, self.is_open = Bar(), True
        self.bar.update()


class Bar:
    def __init__(self) -> None:
        self.socket = object()

    def update(self) -> None:
        assert self.socket


def test_unsavable_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unsavable state is reported with its attribute: before training, or once it has changed. A
    flag for its existence is not restored without it."""
    before: list[str] = []
    first = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: before.extend(caplog.messages)
    )
    with pytest.raises(small.Interrupted):
        fit(lambda f: [Opens(f)], tmp_path, backup(tmp_path / "runs"), small.Stop(1, 1), first)
    messages = "\n".join(before)
    assert "Opens.file: the position of an open file cannot be saved" in messages
    assert "Opens.numbers: the position of an iterator cannot be saved" in messages
    [line] = {each for each in caplog.messages if "could not be saved or restored" in each}
    assert line.startswith("Opens.bar.socket (object)")
    fit(lambda f: [Opens(f)], tmp_path, backup(tmp_path / "runs"))


class Collects(Callback):
    """Changes an unsavable object in place."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: queue.Queue[int] = queue.Queue()
        self.bars: list[Any] = [object() for _ in range(20_001)]
        self.replaced: Any = object()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.queue.put(batch)
        self.bars.append(object())
        self.replaced = object()


class Frames(Callback):
    def __init__(self, frame: Any) -> None:
        super().__init__()
        self.frame, self.same = frame, frame.copy()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.frame.loc[epoch + 1] = [logs["loss"], threading.Lock()]


def test_unsavable_state_changed_in_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An unsavable object changed in place is reported, too."""
    fit(lambda f: [Collects()], tmp_path, backup(tmp_path / "runs"))
    [line] = {each for each in caplog.messages if "could not be saved or restored" in each}
    names = line.split(" could not be ")[0].split(", ")
    assert {each.split(" ")[0] for each in names} == {
        *("Collects.queue", "Collects.bars", "Collects.replaced")
    }


def test_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = pytest.importorskip("pandas").DataFrame({"loss": [0.5], "odd": [lambda: None]})
    fit(lambda f: [Frames(frame)], tmp_path, backup(tmp_path / "runs"))
    [line] = {each for each in caplog.messages if "could not be saved or restored" in each}
    assert line.startswith("Frames.frame (DataFrame) could not be saved")


class OwnBackup(kd.BackupAndRestore):
    """Counts batches in a subclass of ours."""

    batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        super().on_train_batch_end(batch, logs)


class OwnWatchdog(kd.NaNWatchdog):
    pass


class OwnLog(kd.RunLog):
    pass


def test_subclass_of_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = tmp_path / "runs"

    def own() -> list[Callback]:
        backup = OwnBackup(runs, save_freq=1, on_busy="wait", delete_checkpoint=False)
        return [backup, OwnWatchdog(), OwnLog(runs)]

    with pytest.raises(small.Interrupted):
        fit(lambda f: own(), tmp_path, small.Stop(1, 1))
    resumed = own()
    fit(lambda f: resumed, tmp_path)
    assert resumed[0].batches == EPOCHS * small.BATCHES
    assert not [each for each in caplog.messages if "could not be saved" in each]


class Nothing(Callback):
    """Answers to any name, holds objects that no checkpoint can hold, and changes them in a
    thread."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.seen = np.zeros(2, [("a", "i4"), ("b", "f4")]), {}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.count, daemon=True)

    def __getattr__(self, name: str) -> Any:
        return None

    def count(self) -> None:
        number = 0
        while not self.over.is_set():
            number += 1
            self.seen[number % 5000] = self.seen.pop(number % 3000, number)

    def on_train_begin(self, logs: Any = None) -> None:
        self.thread.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.table["a"] += 1

    def on_train_end(self, logs: Any = None) -> None:
        self.over.set()


def test_objects_that_are_hard_to_inspect(tmp_path: Path) -> None:
    """Inspecting a callback never ends training."""
    callback = Nothing()
    try:
        fit(lambda f: [callback], tmp_path, backup(tmp_path / "runs"))
    finally:
        callback.over.set()
    assert callback.seen


class Waits(Callback):
    """Changes the loss depending on a count since the loss last improved."""

    def __init__(self) -> None:
        super().__init__()
        self.wait, self.seen, self.patience = 0, [], 2
        self.meter = Meter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.wait += 1
        self.seen.append(self.wait)
        self.meter.total = 0 if self.wait == 1 else self.meter.total + 1
        if self.wait > self.patience:
            self.wait = 0
            self.seen.clear()
            if hasattr(self, "rises"):
                self.rises += 1
            elif batch:
                self.rises = 1
        rate = 0.01 * (1 + self.wait + len(self.seen) + self.meter.total)
        set_rate(self.model, rate + getattr(self, "rises", 0))


@pytest.mark.parametrize("at", [(0, 3), (1, 0)])
def test_retried_in_one_process(at: tuple[int, int], tmp_path: Path) -> None:
    """A callback's state after failed training is not the initial state of the next attempt."""

    def fit(directory: Path, waits: Waits, model: keras.Model, *callbacks: Callback) -> Any:
        # Three batches per checkpoint: `waits` then has its initial value.
        backups = kd.BackupAndRestore(directory, save_freq=3, on_busy="wait")
        model.fit(
            *(small.X, small.Y),
            batch_size=8,
            epochs=EPOCHS,
            verbose=0,
            callbacks=[waits, backups, *callbacks],
        )
        return small.state(model)

    waits, model = Waits(), small.model()
    with pytest.raises(small.Interrupted):
        fit(tmp_path / "a", waits, model, small.Stop(*at))
    expected = fit(tmp_path / "b", Waits(), small.model())
    assert fit(tmp_path / "a", waits, model) == expected
