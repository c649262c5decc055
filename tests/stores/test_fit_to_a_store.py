"""Training with checkpoints in a store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.stores, pytest.mark.timeout(300)]

import numpy as np  # noqa: E402
from stores.conftest import Started  # noqa: E402
from stores.servers import Place  # noqa: E402
from support import small  # noqa: E402
from support.cluster import environment  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.storage import runs  # noqa: E402
from keras_distplug.storage.files import open_files  # noqa: E402
from keras_distplug.storage.store import CheckpointStore  # noqa: E402


def fit(place: Place, *callbacks: object, epochs: int = 3) -> list[bytes]:
    model = small.model()
    kept = kd.defaults(place.url, storage_options=place.options)
    model.fit(
        small.X, small.Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[*kept, *callbacks],
    )  # fmt: skip
    return small.state(model)


def test_interrupted(place: Place, stores: Started) -> None:
    """An interrupted run resumes from the store, with the result of an uninterrupted one."""
    expected = fit(stores["memory"])
    with pytest.raises(small.Interrupted):
        fit(place, small.Stop(2, 1))
    assert fit(place) == expected


def test_two_runs_of_one_folder(place: Place) -> None:
    """`distributed_fit` accepts the store, too; in another process, it continues with more
    epochs."""
    model = small.model()
    arguments = {"directory": place.url, "storage_options": place.options, "verbose": 0}
    for epochs in (1, 2):
        kd.distributed_fit(model, small.X, small.Y, batch_size=8, epochs=epochs, **arguments)
    assert model.optimizer.iterations.numpy() == 2 * small.BATCHES


SCRIPT = """
import json, sys, threading
import numpy as np
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage import files, runs
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.checkpoint.saver import Saver
from keras_distplug.storage.store import CheckpointStore

url, options = json.loads(sys.argv[1])
class NoExchange:
    def send(self, topic, text):
        pass

saver, is_over = Saver(), threading.Event()
threading._register_atexit(is_over.set)
opened = files.open_files(url, options)
name = runs.create_run(opened, job=None, seed=0).name
writer = Writer(opened, CheckpointStore(opened, name), Team(0, 1, NoExchange()))

def save():
    is_over.wait()
    for step in (1, 2, 3):
        arrays = {"x": np.full(5 * 2**20, step)}
        writer.save(TrainState(Cursor(0, 0, step), arrays), Writer.new_attempt())

saver.start(1, save)
raise ValueError
"""


@pytest.mark.parametrize("store", ["local", "moto", "sftp"])
def test_end_of_the_process(store: str, stores: Started, tmp_path: Path) -> None:
    """A process that ends with an exception waits for its save, which starts after the
    exception."""
    place = stores[store]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([place.url, dict(place.options)])],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    files = open_files(place.url, place.options)
    stored = CheckpointStore(files, runs.newest_run(files).name).newest("step")  # type: ignore[union-attr]
    assert stored is not None, done.stderr
    assert np.array_equal(stored.arrays["x"], np.full(5 * 2**20, 3)), done.stderr
    assert len(files.names("run-0001")) == 3, done.stderr
