"""Writers that are killed at random points of an upload, in every kind of store."""

from __future__ import annotations

import multiprocessing
import random
import signal
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from stores import writer
from stores.conftest import Started
from stores.servers import Place, small_disk

from keras_distplug.storage import runs
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.store import CheckpointStore

pytestmark = [pytest.mark.stores, pytest.mark.timeout(600)]

KILLS = [8, pytest.param(50, marks=pytest.mark.soak)]
ANSWER_TIMEOUT_S = 60
MB = 10**6
# The size of a checkpoint in bytes: small enough for a save of a few tenths of a second.
SIZES = {"ceph": 20 * MB, "azurite": 20 * MB, "sftp": 10 * MB, "small disk": 20 * MB}
DISK_BYTES = 5 * SIZES["small disk"]  # two kept, the next one, and leftovers of two others
# One process imports the packages of the stores, and is the parent of all writers.
NURSERY = multiprocessing.get_context("forkserver")
NURSERY.set_forkserver_preload(
    ["stores.writer", "keras_distplug.storage.stores.remote", "s3fs", "adlfs", "paramiko"]
)


class Child:
    """A writer in a separate process, and its state.

    Attributes:
        saved: The steps that it reported as committed.
        sent_s: The upload times of their values, in seconds.
        sending: The number of files of values being uploaded.

    """

    def __init__(self, place: Place, run: str, size: int, steps: Iterable[int]) -> None:
        self._said, told = NURSERY.Pipe(duplex=False)
        arguments = (place.url, dict(place.options), run, size, steps, told)
        self._process = NURSERY.Process(target=writer.save_on, args=arguments, daemon=True)
        self._process.start()
        told.close()
        self.saved: list[int] = []
        self.sent_s: list[float] = []
        self.sending = 0

    def hear(self) -> None:
        assert self._said.poll(ANSWER_TIMEOUT_S)
        what, value = self._said.recv()
        if what == "saved":
            self.saved.append(value)
        elif what == "failed":
            self.sending = 0
        elif what == "begin" and value == "values":
            self.sending += 1
            self._start_s = time.monotonic()
        elif what == "end" and value == "values":
            self.sending -= 1
            self.sent_s.append(time.monotonic() - self._start_s)

    def hear_out(self) -> None:
        while True:
            try:
                self.hear()
            except EOFError:
                return

    def end(self) -> int:
        """Kills it and returns its exit code."""
        self._process.kill()
        self._process.join(ANSWER_TIMEOUT_S)
        assert self._process.exitcode is not None
        return self._process.exitcode


def newest_step(files: Files, size: int) -> int:
    """Returns the step of the newest checkpoint, as found and verified by a new process."""
    run = runs.newest_run(files)
    assert run is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is quarantined
        stored = CheckpointStore(files, run.name).newest("step")
    assert stored is not None
    step = stored.manifest.cursor.step
    [(key, value)] = stored.values()
    assert np.array_equal(value, writer.arrays(step, size)[key])
    return step


def tree(files: Files, folder: str) -> set[str]:
    """Returns all files below `folder`."""
    inside = {f"{folder}/{name}" for name in files.names(folder)}
    return set().union(*(tree(files, path) or {path} for path in inside))


@pytest.fixture
def kept(
    request: pytest.FixtureRequest, stores: Started, tmp_path: Path
) -> Iterator[tuple[Place, int]]:
    """Yields the place and the size of saves."""
    size = SIZES[request.param]
    if request.param == "small disk":
        with small_disk(tmp_path, DISK_BYTES) as place:
            yield place, size
    else:
        yield stores[request.param], size


@pytest.mark.parametrize("asked", KILLS)
@pytest.mark.parametrize("kept", SIZES, indirect=True)
def test_kill_in_an_upload(kept: tuple[Place, int], asked: int) -> None:
    """A run that is killed again and again during uploads never loses a committed checkpoint, never
    reads wrong values, continues, and leaves no files behind."""
    place, size = kept
    moments = random.Random(0)
    files = open_files(place.url, place.options)
    run = runs.create_run(files, job=None, seed=0).name
    child = Child(place, run, size, range(1, 4))
    child.hear_out()
    sent_s, newest, in_upload = child.sent_s, newest_step(files, size), 0
    assert (newest, child.end()) == (3, 0)
    kills = 0
    # The number of kills that hit an upload depends on the load of the machine.
    while kills < asked or in_upload < asked / 4 or newest < asked / 5:
        kills += 1
        child = Child(place, run, size, range(newest + 1, 10**6))
        try:
            saves = moments.choice((0, 0, 1))
            while len(child.saved) < saves or not child.sending:
                child.hear()
            # After an upload, the manifest is written and old checkpoints are deleted.
            time.sleep(moments.uniform(0, 1.5 * statistics.median(sent_s)))
        finally:
            ended = child.end()
        assert ended == -signal.SIGKILL
        child.hear_out()
        in_upload += child.sending > 0
        sent_s += child.sent_s
        before, newest = newest, newest_step(files, size)
        assert newest >= max([before, *child.saved])
    # The first of them may find no space because of leftovers, and frees some.
    child = Child(place, run, size, range(newest + 1, newest + 4))
    child.hear_out()
    assert child.end() == 0
    assert newest_step(files, size) == newest + 3
    store = CheckpointStore(files, run)
    expected = {f"{run}/RUN.json"}
    for step in (newest + 2, newest + 3):
        name = f"step-{step:08d}"
        shards = store.read(name).manifest.shards
        expected |= {
            store.path(name, file) for file in ("MANIFEST.json", *(s.file for s in shards))
        }
    assert tree(files, run) == expected
