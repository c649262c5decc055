"""The cost of our callbacks in a plain `fit`, by kind of input.

    python benchmarks/inputs.py [--rounds 5] [--part PART] [--kind INPUT] [--json FILE]

Plain Keras and `BackupAndRestore` take turns: in one process per input in the part `step`, in one
process per measurement in the other parts. (In a process that has used the callback, the package's
corrections of TensorFlow remain active while it measures plain Keras.) Three parts:

- resume: from the start of `fit` to the end of its first step, in a new run and in one that resumes
  at batch 9,000 of 10,000, and the time to read the 9,000 batches without a model;
- step: the time per step of 1 ms, and to the end of the first step, with and without the callback,
  which saves nothing meanwhile, and the difference within every pair;
- memory: the peak resident memory of a process that trains one epoch on 512 MB of float32, as an
  array, as an `np.memmap`, and in `tf.data.Dataset.from_tensor_slices`.

Not verified on GPU. If torch is not installed, its `DataLoader` is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from measured import format_spread, parser, report, show, spread
from rich.table import Table

KINDS = ["arrays", "tf.data", "generator", "PyDataset", "torch DataLoader"]
HELD = ["array", "memory map", "from_tensor_slices"]
BATCHES, RESUMED_AT, BATCH_SIZE = 10_000, 9_000, 8
STEPS = 2_000
BATCH_OF_MEMORY, ROWS, COLUMNS = 1024, 2**17, 2**10  # 512 MB
TIMEOUT_S = 900


class Interrupted(Exception):
    """Ends a `fit`."""


def inputs(kind: str) -> Callable[[], dict[str, Any]]:
    """Returns the input for `fit`: 10,000 batches of 8 samples."""
    import keras
    import numpy as np
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(BATCHES * BATCH_SIZE, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> Any:
            rows = slice(BATCH_SIZE * index, BATCH_SIZE * (index + 1))
            return x[rows], y[rows]

    def generated() -> Any:
        data = Batches()
        yield from (data[number] for number in range(BATCHES))

    def dataset() -> tf.data.Dataset:
        whole = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1000, seed=1)
        return whole.map(lambda x, y: (2 * x, y), num_parallel_calls=2).batch(BATCH_SIZE)

    def loader() -> Any:
        import torch

        data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.DataLoader(
            data, batch_size=BATCH_SIZE, shuffle=True, generator=generator
        )

    makes: dict[str, Callable[[], dict[str, Any]]] = {
        "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH_SIZE},
        "tf.data": lambda: {"x": dataset()},
        "generator": lambda: {"x": generated(), "steps_per_epoch": BATCHES},
        "PyDataset": lambda: {"x": Batches()},
        "torch DataLoader": lambda: {"x": loader()},
    }
    return makes[kind]


def model(features: int = 4) -> Any:
    import keras

    keras.utils.set_random_seed(5)
    made = keras.Sequential([keras.Input((features,)), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return made


def fit(given: dict[str, Any], last: int, callbacks: list[Any]) -> dict[str, float]:
    """Trains up to a batch of the first epoch."""
    import keras

    first: dict[str, float] = {}
    trained = model()  # also starts TensorFlow
    start_s = time.perf_counter()

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            return {}  # it measures this process

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not first:
                first.update(batch=batch, first_s=time.perf_counter() - start_s)
            if batch == last:
                steps_s = time.perf_counter() - start_s - first["first_s"]
                first["step_s"] = steps_s / max(1, batch - first["batch"])
                raise Interrupted

    with contextlib.suppress(Interrupted):
        trained.fit(**given, verbose=0, callbacks=[Watch(), *callbacks])
    return first


def backup(directory: str, save_freq: int | str) -> Any:
    import keras_distplug as kd

    return kd.BackupAndRestore(
        directory, save_freq=save_freq, on_busy="wait", delete_checkpoint=False
    )


def to_resume(kind: str, directory: str) -> dict[str, float]:
    """Trains up to batch 9,000 with checkpoints, and measures the time to read that many."""
    make = inputs(kind)
    found = fit(make(), RESUMED_AT, [backup(directory, RESUMED_AT)])
    found["read_s"] = read_s(kind, make())
    return found


def read_s(kind: str, given: dict[str, Any]) -> float:
    data = given["x"]
    if kind == "arrays":
        return 0.0
    start_s = time.perf_counter()
    batches = (data[n] for n in range(BATCHES)) if kind == "PyDataset" else iter(data)
    for _ in range(RESUMED_AT):
        next(batches)
    return time.perf_counter() - start_s


def resumed(kind: str, directory: str) -> dict[str, float]:
    found = fit(inputs(kind)(), RESUMED_AT + 1, [backup(directory, RESUMED_AT)])
    assert found["batch"] == RESUMED_AT, found
    return found


def steps(kind: str, directory: str, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of plain Keras and of ours, one per round."""
    make = inputs(kind)
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for how in ("plain", "ours") if number % 2 else ("ours", "plain"):
            callbacks = [backup(f"{directory}/{number}", "epoch")] if how == "ours" else []
            for name, value in fit(make(), STEPS, callbacks).items():
                if number:  # the first one warms up
                    found.setdefault(f"{how}_{name}", []).append(value)
    return found


def memory(held: str, directory: str) -> dict[str, float]:
    """Returns the peak memory of one epoch; a directory of "" means plain Keras."""
    import numpy as np
    import tensorflow as tf

    y = np.zeros((ROWS, 1), "float32")
    if held == "memory map":
        with tempfile.TemporaryDirectory() as folder:
            x: Any = np.memmap(f"{folder}/x", "float32", "w+", shape=(ROWS, COLUMNS))
    else:
        x = np.zeros((ROWS, COLUMNS), "float32")
    x[:] = 1
    given: dict[str, Any] = {"x": x, "y": y, "batch_size": BATCH_OF_MEMORY}
    if held == "from_tensor_slices":
        whole = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1000, seed=1)
        given = {"x": whole.batch(BATCH_OF_MEMORY)}
    callbacks = [backup(directory, "epoch")] if directory else []
    model(COLUMNS).fit(**given, verbose=0, callbacks=callbacks)
    return {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each for each in (to_resume, resumed, steps, memory)
}


def measured(part: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Returns the result of `part`, called in a separate process."""
    command = [sys.executable, __file__, "--child", part.__name__, json.dumps(given)]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_resume(rounds: int, kinds: list[str]) -> dict[str, Any]:
    taken: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                new, again = (measured(part, kind, folder) for part in (to_resume, resumed))
            found = {
                "new_s": new["first_s"],
                "resumed_s": again["first_s"],
                "read_s": new["read_s"],
            }
            found["more_s"] = found["resumed_s"] - found["new_s"]
            for name, value in found.items():
                taken[kind].setdefault(name, []).append(value)
    return {kind: {name: spread(v) for name, v in each.items()} for kind, each in taken.items()}


def measure_steps(rounds: int, kinds: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            taken = measured(steps, kind, folder, rounds)
        pairs = zip(taken["ours_step_s"], taken["plain_step_s"], strict=True)
        taken["more_s"] = [ours - plain for ours, plain in pairs]
        found[kind] = {name: spread(values) for name, values in taken.items()}
    return found


def measure_memory(rounds: int) -> dict[str, Any]:
    taken: dict[str, dict[str, list[float]]] = {held: {} for held in HELD}
    for number in range(rounds):
        for held in HELD:
            for how in ("plain", "ours") if number % 2 else ("ours", "plain"):
                with tempfile.TemporaryDirectory() as folder:
                    found = measured(memory, held, folder if how == "ours" else "")
                taken[held].setdefault(how, []).append(found["peak_mb"])
    return {held: {how: spread(v) for how, v in each.items()} for held, each in taken.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--part", choices=("resume", "step", "memory"), help="only this one")
    options.add_argument("--kind", choices=KINDS, help="only this input")
    options.add_argument("--child", nargs=2, help="run one measurement in this process")
    arguments = options.parse_args()
    if arguments.child:
        part, given = arguments.child
        print(json.dumps(PARTS[part](*json.loads(given))), flush=True)
        if part == steps.__name__:  # plain Keras may abort at exit while it reads a generator
            os._exit(0)
        return
    has_torch = importlib.util.find_spec("torch") is not None
    kinds = [kind for kind in KINDS if kind != "torch DataLoader" or has_torch]
    kinds = [arguments.kind] if arguments.kind else kinds
    parts = (arguments.part,) if arguments.part else ("resume", "step", "memory")
    found: dict[str, Any] = {}
    if "resume" in parts:
        found["resume"] = measure_resume(arguments.rounds, kinds)
        table = Table(
            "input", "first step", f"at batch {RESUMED_AT:,}", "more", "reading so far", title="s"
        )
        for kind, each in found["resume"].items():
            names = ("new_s", "resumed_s", "more_s", "read_s")
            table.add_row(kind, *(format_spread(each[name]) for name in names))
        show(table)
    if "step" in parts:
        found["step"] = measure_steps(arguments.rounds, kinds)
        table = Table(
            "input",
            "us per step, plain",
            "ours",
            "difference",
            "s to the first step, plain",
            "ours",
        )
        for kind, each in found["step"].items():
            names = ("plain_step_s", "ours_step_s", "more_s")
            cells = [format_spread(each[name], ".0f", 1e6) for name in names]
            cells += [format_spread(each[f"{how}_first_s"]) for how in ("plain", "ours")]
            table.add_row(kind, *cells)
        show(table)
    if "memory" in parts:
        found["memory"] = measure_memory(arguments.rounds)
        table = Table("512 MB of float32 as", "peak MB, plain", "ours")
        for held, each in found["memory"].items():
            table.add_row(held, *(format_spread(each[how], ".0f") for how in ("plain", "ours")))
        show(table)
    report(arguments, found)


if __name__ == "__main__":
    main()
