"""Tests saves in the background."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from storage.checkpoints import RUN, Checkpoints

from keras_distplug.checkpoint.saver import Saver, SaveResult
from keras_distplug.core.errors import SaveError


class Save:
    """A save that lasts until it is released."""

    def __init__(self, error: Exception | None = None) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.error = error

    def __call__(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(30)
        if self.error is not None:
            raise self.error


def test_background() -> None:
    """`start` returns immediately; the result of the save is returned once."""
    saver, save = Saver(), Save()
    saver.start(7, save)
    assert save.has_begun.wait(30)
    assert saver.is_busy
    assert saver.finished() == []
    save.may_end.set()
    saver.wait()
    assert not saver.is_busy
    [saved] = saver.finished()
    assert (saved.step, saved.error) == (7, None)
    assert saved.seconds > 0
    assert saver.finished() == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, niceness is set per process")
def test_training_comes_first() -> None:
    """The thread that saves, and those that it starts, have a lower priority; the others do not."""
    found = []

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def save() -> None:
        found.append(niceness())
        helper = threading.Thread(target=lambda: found.append(niceness()))
        helper.start()
        helper.join()

    before = niceness()
    saver = Saver()
    for step in (1, 2):
        saver.start(step, save)
        saver.wait()
    assert found == [min(19, before + 10)] * 4
    assert niceness() == before


def test_failure() -> None:
    """Any error raised by a save is returned, and the next one can start."""
    saver, error = Saver(), RuntimeError("no")
    save = Save(error)
    save.may_end.set()
    saver.start(1, save)
    saver.wait()
    assert saver.finished()[0].error is error
    saver.start(2, lambda: None)
    saver.wait()
    assert saver.finished()[0].error is None


def test_one_save_at_a_time() -> None:
    saver, save = Saver(), Save()
    saver.start(1, save)
    with pytest.raises(RuntimeError, match="still being written"):
        saver.start(2, lambda: None)
    save.may_end.set()
    saver.wait()


def test_save_that_hangs() -> None:
    """Waiting ends with an error instead of never."""
    saver, save = Saver(timeout_s=0.2), Save()
    saver.start(1, save)
    with pytest.raises(SaveError, match="still being written"):
        saver.wait()
    save.may_end.set()
    saver.wait()


def test_hanging_save_is_reported() -> None:
    """A save that hangs while training continues counts as failed, and as saved once it has
    finished."""
    saver, save = Saver(timeout_s=0.01), Save()
    saver.start(5, save)
    found: list[SaveResult] = []
    end_s = time.monotonic() + 30
    while len(found) < 2 and time.monotonic() < end_s:
        found += saver.finished()
    assert [each.step for each in found] == [5, 5]
    assert all("step 5 was still being written" in str(each.error) for each in found)
    save.may_end.set()
    while saver.is_busy and time.monotonic() < end_s:
        pass
    assert saver.finished()[-1].error is None
    assert saver.finished() == []


def test_wait_for_nothing() -> None:
    Saver().wait()


SCRIPT = """
import sys, threading
import numpy as np
from pathlib import Path
from storage.checkpoints import Checkpoints
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.checkpoint.saver import Saver

checkpoints = Checkpoints(Path(sys.argv[1]))
x = np.arange(5 * 2**20)

is_over = threading.Event()

def save():
    is_over.wait()
    for step in (1, 2, 3):
        checkpoints.save(TrainState(Cursor(0, 0, step), {"x": x}))

saver = Saver()
threading._register_atexit(is_over.set)
saver.start(1, save)
ENDS
"""


def test_failure_at_the_end_of_the_process(tmp_path: Path) -> None:
    """A save that fails after training has ended is still reported."""
    (tmp_path / "run-0001").write_text("a file in place of a folder")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("ENDS", ""), str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "a checkpoint failed: SaveError" in done.stderr


@pytest.mark.parametrize(
    ("ends", "code"), [("", 0), ("raise ValueError", 1), ("sys.exit(3)", 3)], ids=str
)
def test_end_of_the_process(ends: str, code: int, tmp_path: Path) -> None:
    """A process that ends, even with an exception, waits for the save, which starts to write only
    after the script has ended, and for its deletions."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("ENDS", ends), str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    stored = Checkpoints(tmp_path).newest("step")
    assert stored is not None
    assert stored.arrays["x"][-1] == 5 * 2**20 - 1
    assert sorted(os.listdir(tmp_path / RUN)) == ["step-00000002", "step-00000003"]
