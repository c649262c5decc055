"""Environments in which a script may run: threads, spawned and pooled processes, a notebook's
cells, warnings as errors, compiled and eager steps."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(240)]

from support import small  # noqa: E402
from support.processes import Process  # noqa: E402

import keras_distplug as kd  # noqa: E402

# Trains in plain Keras, or in one folder after the other; it may be killed in the second epoch.
SCRIPT = """
import json, os, signal, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import keras_distplug as kd
from keras_distplug.checkpoint import saver


class Own(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.batches, self.mean = 0, keras.metrics.Mean()
        self.averages = [keras.Variable(weight) for weight in self.model.weights]

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.mean.update_state(logs["loss"])
        for average in self.averages:
            average.assign(average * 0.5)
        if self.kills and self.batches == 7:
            saver.wait_for_all()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, kills=False):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse", metrics=["mae", keras.metrics.R2Score(class_aggregation=None)])
    own = Own()
    own.kills = kills
    callbacks = [own, keras.callbacks.EarlyStopping("loss", restore_best_weights=True)]
    if folder is not None:
        callbacks += kd.defaults(folder, save_freq=2)
    data = {"x": x, "y": x[:, :1], "validation_data": (x[:8], x[:8, :1])}
    model.fit(**data, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    return [own.batches, [weight.numpy().tolist() for weight in model.weights]]


if __name__ == "__main__":
    kills, *folders = sys.argv[1:]
    for folder in folders or [None]:
        print("END", json.dumps(train(folder, kills == "kill")))
"""


def run(script: Path, *given: str, options: Sequence[str] = ()) -> tuple[int, str]:
    with Process([*options, str(script), *given], dict(os.environ)) as process:
        return process.wait(120), process.output()


def test_warnings_as_errors(tmp_path: Path) -> None:
    """With `python -W error`, neither our code nor the code that it calls turns a warning into a
    failure, in a new run and in a resumed one."""
    script, killed, new = tmp_path / "train.py", str(tmp_path / "killed"), str(tmp_path / "new")
    script.write_text(SCRIPT)
    code, plain = run(script, "-")
    assert code == 0, plain
    assert run(script, "kill", killed)[0] == -9
    code, trained = run(script, "-", new, killed, options=("-W", "error"))
    assert code == 0, trained
    assert "resuming at epoch 2/3, batch 3" in trained
    assert "Warning" not in trained
    results = [line for line in trained.splitlines() if line.startswith("END")]
    assert results == plain.splitlines()[-1:] * 2


def spawned(script: Path, folder: str, kills: bool) -> Any:
    """Returns the result of training in a spawned process; its exit code if there is no result."""
    sys.path.insert(0, str(script.parent))
    try:
        context = multiprocessing.get_context("spawn")
        results = script.with_name(f"{kills}.json")
        process = context.Process(target=into_file, args=(script.stem, folder, kills, results))
        process.start()
        process.join(120)
        return json.loads(results.read_text()) if results.exists() else process.exitcode
    finally:
        sys.path.remove(str(script.parent))


def into_file(module: str, folder: str, kills: bool, results: Path) -> None:
    import importlib

    results.write_text(json.dumps(importlib.import_module(module).train(folder, kills)))


def test_spawned(tmp_path: Path) -> None:
    """A training in a spawned process is killed, and resumed in another one."""
    script, folder = tmp_path / "train_spawned.py", str(tmp_path / "runs")
    script.write_text(SCRIPT)
    assert spawned(script, folder, True) == -9
    batches, weights = spawned(script, folder, False)
    code, plain = run(script, "-")
    assert code == 0, plain
    assert [batches, weights] == json.loads(plain.splitlines()[-1].removeprefix("END "))


def fit(*callbacks: Any, **compiled: Any) -> Any:
    model = small.model()
    if compiled:
        model.compile("adam", "mse", **compiled)
    given = {"batch_size": 6, "epochs": 3, "verbose": 0}
    history = model.fit(small.X, small.Y, **given, callbacks=list(callbacks))
    return small.state(model), history.history


def backup(directory: Path) -> Any:
    return kd.BackupAndRestore(directory, save_freq=1, on_busy="wait", delete_checkpoint=False)


def interrupted(directory: Path, **compiled: Any) -> None:
    with pytest.raises(small.Interrupted):
        fit(small.Stop(1, 1), backup(directory), **compiled)


@pytest.mark.parametrize("compiled", [{"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_steps(compiled: dict[str, Any], tmp_path: Path) -> None:
    """Steps that XLA compiles, or that are not traced, resume bit for bit like plain Keras."""
    interrupted(tmp_path, **compiled)
    assert fit(backup(tmp_path), **compiled) == fit(**compiled)


def in_thread(act: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join(120)
    [only] = found
    return only


def test_thread(tmp_path: Path) -> None:
    """A `fit` in a thread resumes, with `defaults()`; signals stay with the main thread."""
    in_thread(lambda: interrupted(tmp_path))
    assert in_thread(lambda: fit(*kd.defaults(tmp_path, save_freq="epoch"))) == fit()


def test_cells(tmp_path: Path) -> None:
    """A notebook cell that was stopped is run again: with a new model, and with the same."""
    cell = "history = fit(*callbacks(), stop)"
    scope: dict[str, Any] = {"fit": fit, "stop": small.Stop(1, 1)}
    scope["callbacks"] = lambda: [backup(tmp_path)]
    with pytest.raises(small.Interrupted):
        exec(cell, scope)
    scope["stop"] = small.Stop()
    exec(cell, scope)
    assert scope["history"] == fit()


STOPPED_CELL = """
import signal, threading
class Stop(keras.callbacks.Callback):
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 1): signal.raise_signal(signal.SIGINT)
    def on_epoch_begin(self, epoch, logs=None): self.epoch = epoch
stop = [Stop()]
"""
CELL = """
import keras, numpy as np, keras_distplug as kd
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=CALLBACKS)
print("END", [weight.tolist() for weight in model.get_weights()], history.history)
"""


def test_kernel(tmp_path: Path) -> None:
    """A cell in a real kernel is interrupted as by its stop button, and run again; then the kernel
    is restarted."""
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    ours = f"[*stop, *kd.defaults({str(tmp_path / 'runs')!r}, save_freq=1)]"
    cells = [
        *(CELL.replace("CALLBACKS", "[]"), STOPPED_CELL),
        *(CELL.replace("CALLBACKS", ours), "stop = []", CELL.replace("CALLBACKS", ours)),
    ]

    def executed(sources: list[str]) -> Any:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in sources])
        nbclient.NotebookClient(book, timeout=120, allow_errors=True).execute()
        return [
            "".join(f"{each.get('text', '')}{each.get('ename', '')}" for each in cell.outputs)
            for cell in book.cells
        ]

    plain, _, stopped, _, again = executed(cells)
    assert "KeyboardInterrupt" in stopped
    assert "resuming at epoch 2/3" in again
    expected = plain.splitlines()[-1]
    assert expected.startswith("END")
    assert again.splitlines()[-1] == expected
    _, restarted = executed(["stop = []", CELL.replace("CALLBACKS", ours)])
    assert "this run is finished" in restarted
    assert restarted.splitlines()[-1] == expected


def test_joblib(tmp_path: Path) -> None:
    """Training runs in joblib's workers, each with a separate folder."""
    joblib = pytest.importorskip("joblib", reason="pip install joblib")
    loky = pytest.importorskip("joblib.externals.loky")
    script = tmp_path / "train_pooled.py"
    script.write_text(SCRIPT)
    sys.path.insert(0, str(tmp_path))
    try:
        import train_pooled  # type: ignore[import-not-found]

        folders = [str(tmp_path / "runs" / str(number)) for number in range(2)]
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        found = joblib.Parallel(n_jobs=2)(joblib.delayed(train_pooled.train)(f) for f in folders)
        loky.get_reusable_executor().shutdown(
            wait=True
        )  # new processes, which have finished no `fit`
        again = joblib.Parallel(n_jobs=2)(joblib.delayed(train_pooled.train)(f) for f in folders)
    finally:
        sys.path.remove(str(tmp_path))
    assert found[0] == found[1]
    assert again[0][1] == found[0][1]
