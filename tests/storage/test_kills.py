"""Workers that are killed at any point while they save."""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import stamina
from checkpoints import RUN, Checkpoints
from forks import kill_before, start

from keras_distplug.core.errors import AgreementError
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.retention import Retention
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.stores.local import LocalFiles

KILLS = 200


class Notes:
    """Messages between workers in several processes, through files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def send(self, topic: str, text: str) -> None:
        draft = self._folder / f"{os.getpid()}.draft"
        draft.write_text(text)
        draft.rename(self._folder / topic.replace("/", "~"))

    def receive(self, topic: str, timeout_s: float) -> str:
        note = self._folder / topic.replace("/", "~")
        end_s = time.monotonic() + timeout_s
        while not note.exists():
            if time.monotonic() > end_s:
                raise AgreementError(f"waited {timeout_s} s for {topic}")
            time.sleep(0.0005)
        return note.read_text()

    def forget(self, topic: str) -> None:
        for note in self._folder.glob(f"{topic}/*".replace("/", "~")):
            note.unlink()


def state(step: int) -> TrainState:
    random_ = np.random.default_rng(step)
    arrays = {
        "a": random_.integers(0, 256, 40_000, np.uint8),
        "b": random_.normal(size=(70, 9)),
        "step": np.array(step),
    }
    return TrainState(Cursor(0, 0, step), arrays)


def newest_step(root: Path) -> int:
    """Returns the step of the newest checkpoint, after verifying every bit of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = Checkpoints(root).newest("step")
    if stored is None:
        return 0
    step = stored.manifest.cursor.step
    for key, value in state(step).arrays.items():
        assert np.array_equal(stored.arrays[key], value), key
    return step


def saving(
    root: Path, notes: Path, rank: int, size: int, first: int, acknowledged: int
) -> Callable[[], None]:
    """Saves one step after another; the first worker writes every committed one to a pipe."""

    def save() -> None:
        stamina.set_active(False)
        files = LocalFiles(root)
        store = CheckpointStore(files, RUN, Retention(keep_last=2))
        writer = Writer(files, store, Team(rank, size, Notes(notes), timeout_s=20.0))
        for step in itertools.count(first):
            writer.save(state(step), f"{notes.name}-{step}")
            if rank == 0:
                os.write(acknowledged, step.to_bytes(8, "big"))

    return save


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1])
def test_kill_of_one_of_two_workers_at_every_call(victim: int, tmp_path: Path) -> None:
    """One of two workers is killed at any system call of a save, and the other one because of that,
    as a supervisor does: either the previous checkpoint or the new one is the newest and intact,
    and both workers can continue."""
    template = tmp_path / "template"
    for step in (1, 2):
        save_together(template, tmp_path / "notes" / str(step), step)
    after = []
    for number in itertools.count(1):
        root = shutil.copytree(template, tmp_path / str(number))
        notes = tmp_path / "notes" / f"killed-{number}"
        ended = save_together(root, notes, 3, victim=victim, before_call=number)
        after.append(newest_step(root))
        assert save_together(root, tmp_path / "notes" / f"after-{number}", 4) == 0
        assert newest_step(root) == 4
        assert sorted(os.listdir(root / RUN)) == [f"step-0000000{step}" for step in (after[-1], 4)]
        shutil.rmtree(root)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert number > 15
    assert set(after) == {2, 3}


def save_together(
    root: Path, notes: Path, step: int, victim: int = 0, before_call: int | None = None
) -> int:
    """Saves with two workers. Returns the result of the victim, which took the other one with
    it."""

    def save(rank: int) -> None:
        stamina.set_active(False)
        files, exchange = LocalFiles(root), Notes(notes)
        store = CheckpointStore(files, RUN, Retention(keep_last=2))
        writer = Writer(files, store, Team(rank, 2, exchange, timeout_s=20.0))
        if rank == victim and before_call is not None:
            kill_before(before_call, uncounted=("stat",))  # the mechanism by which `Notes` wait
        writer.save(state(step), notes.name)

    children = [start(functools.partial(save, rank)) for rank in range(2)]
    ended = os.waitstatus_to_exitcode(os.waitpid(children[victim], 0)[1])
    other = children[1 - victim]
    if ended:
        os.kill(other, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0 or ended
    return ended


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_random_kills(size: int, tmp_path: Path) -> None:
    """A run that is killed again and again at random points never loses a committed checkpoint,
    never reads wrong values, and continues from the last one."""
    root = tmp_path / "root"
    moments = random.Random(size)
    newest, fired, torn = 0, 0, 0
    for round_ in range(KILLS // size):
        said, acknowledged = os.pipe()
        notes = tmp_path / f"notes-{round_}"
        children = [
            start(saving(root, notes, rank, size, newest + 1, acknowledged)) for rank in range(size)
        ]
        os.close(acknowledged)
        told = os.read(said, 8) if round_ % 2 else b""  # so that the run makes progress
        time.sleep(moments.uniform(0.0, 0.06))
        for child in moments.sample(children, len(children)):
            os.kill(child, signal.SIGKILL)
            fired += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with open(said, "rb") as words:
            told += words.read()
        committed = int.from_bytes(told[-8:], "big") if told else newest
        before, newest = newest, newest_step(root)
        assert newest >= committed >= before
        torn += any(not (path / "MANIFEST.json").exists() for path in (root / RUN).glob("step-*"))
    assert fired == KILLS
    assert torn  # kills did hit saves in progress
    assert newest >= KILLS / size / 2
