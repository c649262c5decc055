"""The cost of checkpoints, compared with those of Keras, TensorFlow and Orbax.

    python benchmarks/checkpoint.py [--sizes 100 1200] [--rounds 5] [--only PART] [--json FILE]

Four parts, each interleaved, with medians and their spread:

- stall: the time that a save blocks the training thread, the slowdown of the next five steps, the
  time until the save is complete, and the time to restore it (`--sizes`, in MB of weights and
  Adam's slots);
- fit: the time of a whole `fit` with a save every 50 steps, divided by that of one without, as the
  median over the rounds; and the same for the CPU time, all of which training uses here;
- bandwidth: a save, and restoring it in a new process, compared with writing (with fsync) and
  reading the same bytes; and the time for one thread to touch as much new memory, without reading;
- workers: saves by 1, 2 and 4 workers (threads here) to a store with 20 MB/s per connection.

On a virtual machine whose host sometimes gives its processors to others (`steal`), an affected
measurement is repeated; the table shows the remaining steal. A host may also reclaim free memory,
and needs up to 20 us to give a page back, ten times as long as the rest of a first touch: except
for the stall, it is made to provide enough memory just before a measurement.

Keras and TensorFlow do not fsync, keras_distplug does. OrbaxCheckpoint is measured if
`orbax-checkpoint` is installed. Not verified on GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from measured import format_spread, parser, report, show, spread
from rich.table import Table

import keras_distplug as kd
from keras_distplug.checkpoint import capture, saver
from keras_distplug.cluster.agreement import alone
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage import codec
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.retention import Retention
from keras_distplug.storage.runs import create_run
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.stores.local import LocalFiles

T = TypeVar("T")
MB = 10**6
WIDTH, INPUTS = 2048, 256
BYTES_A_WEIGHT = 12  # the weight and Adam's two slots
STEPS = 5
RUN, RAW, WEIGHTS = "run-0001", "raw", "model.weights.h5"
FIT_STEPS, FIT_SAVE_EVERY, FIT_STEP_S = 200, 50, 0.1
STEAL, TRIES = 0.05, 4
CONNECTION_BYTES_PER_S = 20 * MB


def model_of(size_mb: float) -> keras.Model:
    """Returns a perceptron whose weights and optimizer have about this size."""
    hidden = max(0, round((size_mb * MB / BYTES_A_WEIGHT - INPUTS * WIDTH) / WIDTH**2))
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((INPUTS,)), *(layers.Dense(WIDTH, "relu") for _ in range(1 + hidden))]
    )
    model.add(layers.Dense(10))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    return model


def have_memory_lent(size_bytes: int) -> None:
    """Makes the host provide this much memory to this machine, then frees it for other uses."""
    memory = mmap.mmap(-1, size_bytes)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1  # the array is freed immediately
    memory.close()


def batch_of(samples: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, INPUTS)).astype("float32"), rng.integers(0, 10, samples)


class Subject(Protocol):
    """A way to save and restore a model."""

    def save(self, number: int) -> None:
        """Saves the model, as the training thread would."""

    def wait(self) -> None:
        """Returns once everything is written."""

    def take_up(self) -> None:
        """Restores the newest checkpoint into the model."""


class Ours:
    def __init__(self, model: keras.Model, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._callback = self._new()
        self._callback.on_train_begin()

    def _new(self) -> kd.BackupAndRestore:
        callback = kd.BackupAndRestore(self._folder, on_busy="wait")
        self._model.history = keras.callbacks.History()
        self._model.history.on_train_begin()
        callback.set_model(self._model)
        callback.set_params({"epochs": 10**6, "steps": STEPS})
        return callback

    def save(self, number: int) -> None:
        self._callback.on_epoch_begin(number)
        self._callback.on_epoch_end(number, {"loss": 0.0})

    def wait(self) -> None:
        saver.wait_for_all()

    def take_up(self) -> None:
        self._new().on_train_begin()


class KerasBackup:
    def __init__(self, model: keras.Model, folder: Path) -> None:
        self._callback = keras.callbacks.BackupAndRestore(str(folder))
        self._callback.set_model(model)

    def save(self, number: int) -> None:
        self._callback.on_epoch_end(number)

    def wait(self) -> None:
        pass

    def take_up(self) -> None:
        self._callback.on_train_begin()


class KerasModelCheckpoint:
    def __init__(self, model: keras.Model, folder: Path) -> None:
        folder.mkdir()
        self._model, self._file = model, str(folder / "model.weights.h5")
        self._callback = keras.callbacks.ModelCheckpoint(self._file, save_weights_only=True)
        self._callback.set_model(model)

    def save(self, number: int) -> None:
        self._callback.on_epoch_end(number, {"loss": 0.0})

    def wait(self) -> None:
        pass

    def take_up(self) -> None:
        self._model.load_weights(self._file)


class TensorFlowManager:
    """A checkpoint of TensorFlow's variables: with the model itself, the second asynchronous save
    fails (Keras 3.15, TensorFlow 2.21: Keras creates a variable inside a `tf.function`)."""

    def __init__(self, model: keras.Model, folder: Path, *, is_async: bool) -> None:
        self._checkpoint = tf.train.Checkpoint(
            variables=[variable.value for variable in capture.list_variables(model).values()]
        )
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(folder), max_to_keep=2)
        self._options = tf.train.CheckpointOptions(enable_async=is_async)

    def save(self, number: int) -> None:
        self._manager.save(number, options=self._options)

    def wait(self) -> None:
        self._checkpoint.sync()

    def take_up(self) -> None:
        self._checkpoint.restore(self._manager.latest_checkpoint)


class KerasOrbax:
    def __init__(self, model: keras.Model, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._callback = keras.callbacks.OrbaxCheckpoint(str(folder), max_to_keep=2)
        self._callback.set_model(model)

    def save(self, number: int) -> None:
        self._callback.on_epoch_end(number, {"loss": 0.0})

    def wait(self) -> None:
        for future in self._callback._async_futures:
            future.result()

    def take_up(self) -> None:
        self._model.load_weights(str(self._folder))


def subjects_of(model: keras.Model, folder: Path) -> dict[str, Subject]:
    subjects: dict[str, Subject] = {
        "keras_distplug": Ours(model, folder / "ours"),
        "keras BackupAndRestore": KerasBackup(model, folder / "backup"),
        "keras ModelCheckpoint": KerasModelCheckpoint(model, folder / "weights"),
        "CheckpointManager": TensorFlowManager(model, folder / "sync", is_async=False),
        "CheckpointManager async": TensorFlowManager(model, folder / "async", is_async=True),
    }
    if hasattr(keras.callbacks, "OrbaxCheckpoint") and importlib.util.find_spec("orbax"):
        subjects["keras OrbaxCheckpoint"] = KerasOrbax(model, folder / "orbax")
    return subjects


def seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


class Host:
    """The share of processor time that the host of a virtual machine takes during measurements."""

    def __init__(self) -> None:
        self.steal: list[float] = []

    def undisturbed(self, measure: Callable[[], T]) -> T:
        """Returns the first result of `measure` with little steal, or the one with the least."""
        tries: list[tuple[float, T]] = []
        while len(tries) < TRIES and (not tries or tries[-1][0] > STEAL):
            start_s, taken_s = time.perf_counter(), self._taken_s()
            found = measure()
            passed_s = (time.perf_counter() - start_s) * (os.cpu_count() or 1)
            tries.append(((self._taken_s() - taken_s) / passed_s, found))
        share, found = min(tries, key=itemgetter(0))
        self.steal.append(share)
        return found

    @staticmethod
    def _taken_s() -> float:
        stat = Path("/proc/stat")
        if not stat.exists():
            return 0.0
        return int(stat.read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


def measure_stall(
    host: Host, size_mb: float, rounds: int, folder: Path
) -> dict[str, dict[str, Any]]:
    model = model_of(size_mb)
    batch = batch_of(8)
    subjects = subjects_of(model, folder)
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in subjects}

    def step() -> float:
        return seconds(lambda: model.train_on_batch(*batch))

    numbers = itertools.count()

    def one(subject: Subject) -> dict[str, float]:
        quiet_s = statistics.median(step() for _ in range(STEPS))
        begin = time.perf_counter()
        subject.save(next(numbers))
        stall_s = time.perf_counter() - begin
        steps_s = sum(step() for _ in range(STEPS))
        subject.wait()
        return {
            "stall_s": stall_s,
            "excess_s": steps_s - STEPS * quiet_s,
            "saved_s": time.perf_counter() - begin,
            "step_s": quiet_s,
            "taken_up_s": seconds(subject.take_up),
        }

    for number in range(-1, rounds):  # the first round warms up
        names = list(subjects)
        for name in names if number % 2 else reversed(names):
            found = host.undisturbed(lambda name=name: one(subjects[name]))
            for what, value in found.items() if number >= 0 else ():
                taken[name].setdefault(what, []).append(value)
    mb = sum(v.value.shape.num_elements() * 4 for v in capture.list_variables(model).values()) / MB
    return {
        name: {what: spread(values) for what, values in each.items()} | {"mb": mb}
        for name, each in taken.items()
    }


class EveryBatches(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves with TensorFlow's manager, as users would."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._saves = TensorFlowManager(self.model, self._folder, is_async=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches % FIT_SAVE_EVERY == 0:
            self._saves.save(self._batches)

    def on_train_end(self, logs: Any = None) -> None:
        self._saves.wait()


def fit_data(samples: int, steps: int) -> tf.data.Dataset:
    options = tf.data.Options()
    # Otherwise the end of a `fit` sometimes waits for the autotuning thread, which sleeps until
    # 2.55, 5.11, 10.23, 20.47 ... seconds after its start (TensorFlow 2.21).
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors(batch_of(samples)).repeat(steps).with_options(options)


def step_s_of(model: keras.Model, samples: int) -> float:
    """Measures in a `fit`, because `train_on_batch` has different timings."""
    steps = 20
    data = fit_data(samples, steps)
    model.fit(data, verbose=0)
    return seconds(lambda: model.fit(data, verbose=0)) / steps


def measure_fit(host: Host, rounds: int, folder: Path) -> dict[str, dict[str, Any]]:
    model = model_of(100)
    samples = 32
    while host.undisturbed(partial(step_s_of, model, samples)) < 0.9 * FIT_STEP_S:
        samples = 5 * samples // 4
    data = fit_data(samples, FIT_STEPS)
    callbacks: dict[str, Callable[[Path], list[keras.callbacks.Callback]]] = {
        "no checkpoints": lambda here: [],
        "keras_distplug": lambda here: [kd.BackupAndRestore(here, save_freq=FIT_SAVE_EVERY)],
        "keras BackupAndRestore": lambda here: [
            keras.callbacks.BackupAndRestore(str(here), save_freq=FIT_SAVE_EVERY)
        ],
        "CheckpointManager async": lambda here: [EveryBatches(here)],
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in callbacks}

    def one(make: Callable[[Path], list[keras.callbacks.Callback]]) -> tuple[float, float]:
        here = folder / uuid.uuid4().hex
        made = make(here)
        have_memory_lent(5 * 100 * MB)
        start_s = time.process_time()
        took = seconds(lambda: model.fit(data, callbacks=made, verbose=0))
        worked_s = time.process_time() - start_s
        shutil.rmtree(here, ignore_errors=True)
        return took, worked_s

    for number in range(-1, rounds):
        names = list(callbacks)
        for name in names if number % 2 else reversed(names):
            took = host.undisturbed(lambda make=callbacks[name]: one(make))
            taken[name] += [took] if number >= 0 else []
    without = taken["no checkpoints"]
    found = {}
    for name, each in taken.items():
        pairs = list(zip(each, without, strict=True))
        found[name] = {
            "took_s": spread(took for took, _ in each),
            "worked_s": spread(worked for _, worked in each),
            "slower_by": spread(one[0] / other[0] - 1 for one, other in pairs),
            "more_work": spread(one[1] / other[1] - 1 for one, other in pairs),
        }
    return found


def measure_bandwidth(host: Host, size_mb: float, rounds: int, folder: Path) -> dict[str, Any]:
    model = model_of(size_mb)
    state = state_of(capture.capture(model))
    parts = [np.asarray(tensor).reshape(-1).view(np.uint8).data for tensor in state.arrays.values()]
    size = sum(part.nbytes for part in parts)
    files = open_files(folder)
    store = CheckpointStore(files, RUN, Retention(keep_last=10**6))
    writer = Writer(files, store, Team(0, 1, alone()))
    raw = folder / RAW
    model.save_weights(folder / WEIGHTS)

    def write_raw() -> None:
        with open(raw, "wb", buffering=0) as file:
            for part in parts:
                for begin in range(0, len(part), codec.PART_BYTES):
                    file.write(part[begin : begin + codec.PART_BYTES])
            os.fsync(file.fileno())

    actions: dict[str, Callable[[], Any]] = {
        "write_s": write_raw,
        "save_s": lambda: writer.save(state, writer.new_attempt()),
    }
    taken: dict[str, list[float]] = {}

    def one(action: Callable[[], Any]) -> float:
        # Every measurement has the same share of the page cache and of the disk.
        raw.unlink(missing_ok=True)
        for name in os.listdir(folder / RUN) if (folder / RUN).exists() else ():
            store.delete(name)
        have_memory_lent(3 * size)
        return seconds(action)

    for number in range(-1, rounds):
        for what in list(actions) if number % 2 else reversed(actions):
            took = host.undisturbed(lambda what=what: one(actions[what]))
            taken.setdefault(what, []).extend([took] if number >= 0 else [])
    for action in actions.values():
        action()
    for number in range(rounds):
        for what in list(READINGS) if number % 2 else reversed(READINGS):
            took = host.undisturbed(lambda what=what: read_after_restart(what, size_mb, folder))
            taken.setdefault(what, []).append(took)
    return {what: spread(values) for what, values in taken.items()} | {"mb": size / MB}


def read_raw(model: keras.Model, folder: Path) -> None:
    with open(folder / RAW, "rb") as file:
        file.read()


def take_up(model: keras.Model, folder: Path) -> None:
    stored = CheckpointStore(open_files(folder), RUN).newest("step")
    assert stored is not None
    before = capture.capture(model)  # to restore it afterwards, as the callback does
    capture.restore(model, stored.manifest.variables, stored.values(capture.allocate))
    del before


def load_weights(model: keras.Model, folder: Path) -> None:
    model.load_weights(folder / WEIGHTS)


def touch(model: keras.Model, folder: Path) -> None:
    """Touches new memory, which every restore must do while the model keeps its old values."""
    have_memory_lent((folder / RAW).stat().st_size)


READINGS = {"read_s": read_raw, "take_up_s": take_up, "h5_s": load_weights, "touch_s": touch}


def read_after_restart(what: str, size_mb: float, folder: Path) -> float:
    """Measures in a new process: memory that a process has used before is faster than new one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(read_into_new_model, what, size_mb, folder).result()


def read_into_new_model(what: str, size_mb: float, folder: Path) -> float:
    model = model_of(size_mb)
    have_memory_lent(round(3 * size_mb * MB))
    return seconds(lambda: READINGS[what](model, folder))


class Board:
    """Messages between workers that are threads."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}
        self._changed = threading.Condition()

    def send(self, topic: str, text: str) -> None:
        with self._changed:
            self._said[topic] = text
            self._changed.notify_all()

    def receive(self, topic: str, timeout_s: float) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: topic in self._said, timeout_s)
            return self._said[topic]

    def forget(self, topic: str) -> None:
        with self._changed:
            for each in [each for each in self._said if each.startswith(f"{topic}/")]:
                del self._said[each]


class RateLimited(LocalFiles):
    """Files that are written at a limited rate per file, regardless of the number of files."""

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        begin = time.perf_counter()

        def slowly() -> Iterable[bytes | memoryview]:
            done = 0
            for part in parts:
                yield part
                done += len(part)
                due_s = done / CONNECTION_BYTES_PER_S
                time.sleep(max(0.0, due_s - (time.perf_counter() - begin)))

        super().create(path, slowly())


def measure_workers(host: Host, rounds: int, folder: Path) -> dict[int, dict[str, Any]]:
    rng = np.random.default_rng(0)
    state = state_of({f"w{i}": rng.random(2_500_000, np.float32) for i in range(10)})
    taken: dict[int, list[float]] = {1: [], 2: [], 4: []}

    def one(count: int) -> float:
        files: Files = RateLimited(folder / uuid.uuid4().hex)
        store = CheckpointStore(files, create_run(files, job=None, seed=0).name)
        board, attempt = Board(), Writer.new_attempt()
        writers = [Writer(files, store, Team(rank, count, board)) for rank in range(count)]
        with ThreadPoolExecutor(count) as pool:
            return seconds(lambda: list(pool.map(lambda each: each.save(state, attempt), writers)))

    for _ in range(rounds):
        for count, times in taken.items():
            times.append(host.undisturbed(partial(one, count)))
    return {count: spread(times) for count, times in taken.items()}


def state_of(arrays: Any) -> TrainState:
    return TrainState(cursor=Cursor(1, 0, 1), arrays=arrays, history={}, history_epochs=())


def table_of_stall(found: dict[str, dict[str, Any]]) -> Table:
    reference = found["keras BackupAndRestore"]["stall_s"]["median"]
    ours = found["keras_distplug"]
    step_ms = 1000 * ours["step_s"]["median"]
    table = Table(title=f"{ours['mb']:.0f} MB of state, steps of {step_ms:.0f} ms: medians (range)")
    for heading in ("", "stall", "of Keras'", "5 steps' excess", "both, of Keras'", "saved after"):
        table.add_column(heading)
    table.add_column("restored in")
    for name, one in found.items():
        stall_s, excess_s = (one[what]["median"] for what in ("stall_s", "excess_s"))
        table.add_row(
            name,
            format_spread(one["stall_s"], ".1f", 1000, " ms"),
            f"{stall_s / reference:.1%}",
            format_spread(one["excess_s"], ".0f", 1000, " ms"),
            f"{(stall_s + excess_s) / reference:.1%}",
            format_spread(one["saved_s"], unit=" s"),
            format_spread(one["taken_up_s"], unit=" s"),
        )
    return table


def table_of_fit(found: dict[str, dict[str, Any]]) -> Table:
    step_ms = 1000 * found["no checkpoints"]["took_s"]["median"] / FIT_STEPS
    table = Table(
        title=f"fit: {FIT_STEPS} steps of {step_ms:.0f} ms, a save of 100 MB every "
        f"{FIT_SAVE_EVERY}: medians (range)"
    )
    for heading in ("", "seconds", "slower by", "more processor time"):
        table.add_column(heading)
    for name, one in found.items():
        shares = (format_spread(one[what], ".1%") for what in ("slower_by", "more_work"))
        table.add_row(name, format_spread(one["took_s"]), *shares)
    return table


def table_of_bandwidth(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['mb']:.0f} MB, local, page cache warm: medians (range)")
    for heading in ("", "MB/s", "share"):
        table.add_column(heading)
    for name, what, of in (
        ("write + fsync", "write_s", "write_s"),
        ("save", "save_s", "write_s"),
        ("open().read()", "read_s", "read_s"),
        ("restore, verified", "take_up_s", "read_s"),
        ("Keras load_weights (.h5)", "h5_s", "read_s"),
        ("new memory, touched by one thread", "touch_s", "read_s"),
    ):
        speeds = spread(found["mb"] / each for each in found[what]["values"])
        share = found[of]["median"] / found[what]["median"]
        table.add_row(name, format_spread(speeds, ".0f"), f"{share:.2f}")
    return table


def table_of_workers(found: dict[int, dict[str, Any]]) -> Table:
    table = Table(title="100 MB, 20 MB/s per connection: medians (range)")
    for heading in ("workers", "MB/s", "times one worker's"):
        table.add_column(heading)
    for count, one in found.items():
        speeds = spread(100 / each for each in one["values"])
        table.add_row(
            str(count), format_spread(speeds, ".1f"), f"{found[1]['median'] / one['median']:.2f}"
        )
    return table


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", type=float, nargs="+", default=[100, 1200], help="MB of state")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", choices=["stall", "fit", "bandwidth", "workers"])
    options.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    arguments = options.parse_args()
    rounds, sizes = arguments.rounds, arguments.sizes
    measurements: dict[str, list[Callable[[Host, Path], Any]]] = {
        "stall": [partial(measure_stall, rounds=rounds, size_mb=size) for size in sizes],
        "fit": [partial(measure_fit, rounds=rounds)],
        "bandwidth": [partial(measure_bandwidth, rounds=rounds, size_mb=size) for size in sizes],
        "workers": [partial(measure_workers, rounds=3)],
    }
    tables: dict[str, Callable[[Any], Table]] = {
        "stall": table_of_stall,
        "fit": table_of_fit,
        "bandwidth": table_of_bandwidth,
        "workers": table_of_workers,
    }
    results: dict[str, list[Any]] = {}
    for part, of_part in measurements.items():
        for measure in of_part if arguments.only in (None, part) else ():
            host = Host()
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                found = measure(host, folder=Path(folder))
            keras.backend.clear_session()
            table = tables[part](found)
            steal = host.steal or [0.0]
            table.caption = f"steal {statistics.median(steal):.1%}, at most {max(steal):.1%}"
            show(table)
            results.setdefault(part, []).append({"found": found, "steal": host.steal})
    report(arguments, results)


if __name__ == "__main__":
    main()
