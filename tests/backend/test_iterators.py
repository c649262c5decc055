"""Iterators whose destruction takes long."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import tensorflow as tf

from keras_distplug.backend.tensorflow.input import iterators
from keras_distplug.data.position import Positioned
from keras_distplug.data.sources import TfData

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]


class Slow:
    """Waits for permission in its destructor, and records the thread."""

    def __init__(self) -> None:
        self.may_end, self.ended = threading.Event(), threading.Event()
        self.thread = ""

    def as_iterator(self) -> Any:
        slow = self

        class Resource:
            def __del__(self) -> None:
                slow.thread = threading.current_thread().name
                assert slow.may_end.wait(60)
                slow.ended.set()

        class Iterator:
            def __init__(self) -> None:
                self.resource = Resource()

        return Iterator()


def test_dropping_does_not_wait() -> None:
    """Dropping an iterator does not wait for its destruction, which happens once the last reference
    is gone, regardless of other iterators."""
    kept, slow = Slow(), Slow()
    another, iterator = kept.as_iterator(), slow.as_iterator()
    iterators.end_beside(another)
    iterators.end_beside(iterator)
    slow.may_end.set()
    assert not slow.ended.wait(0.2)
    del iterator
    assert slow.ended.wait(60)
    assert slow.thread == "keras_distplug-iterators"
    assert not kept.ended.is_set()
    kept.may_end.set()
    del another
    assert kept.ended.wait(60)


def test_slow_destruction_delays_no_other() -> None:
    """A slow destruction does not delay others."""
    long, short = Slow(), Slow()
    for each in (long, short):
        iterators.end_beside(each.as_iterator())
    short.may_end.set()
    assert short.ended.wait(60)
    assert not long.ended.is_set()
    long.may_end.set()
    assert long.ended.wait(60)


def test_dropped_by_the_garbage_collector() -> None:
    slow = Slow()
    iterator = slow.as_iterator()
    iterators.end_beside(iterator)
    iterator.itself = [iterator]
    slow.may_end.set()
    del iterator
    gc.collect()
    assert slow.ended.wait(60)
    assert slow.thread == "keras_distplug-iterators"


def dropped(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Returns a list that collects the parts handed over from now on."""
    handed_over: list[list[Any]] = []
    monkeypatch.setattr(iterators, "_hand_over", handed_over.append)
    return handed_over


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_passes_over_data(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """All iterators over the data of a `fit`, ours and those of a strategy, are destroyed in this
    way, including TensorFlow's own."""
    handed_over = dropped(monkeypatch)
    data = Positioned(TfData(tf.data.Dataset.range(9).batch(2), seed=0))
    if strategy == "mirrored":
        data.use(tf.distribute.MirroredStrategy(["CPU:0"]))
    first = iter(data)
    next(first)
    assert handed_over == []
    second = iter(data)
    assert handed_over == []
    del first
    assert len(handed_over) == 1
    assert resources(handed_over[0])
    del data, second
    assert len(handed_over) == 2


def resources(parts: Any) -> list[tf.Tensor]:
    """Returns the handles of TensorFlow's iterators, at any depth of the parts."""
    if isinstance(parts, tf.Tensor):
        return [parts] if parts.dtype in (tf.resource, tf.variant) else []
    if isinstance(parts, (list, tuple)):
        return [found for part in parts for found in resources(part)]
    if type(parts).__module__.startswith("tensorflow.python.d") and hasattr(parts, "__dict__"):
        owned = {key: each for key, each in vars(parts).items() if "iterator" in key}
        return resources(list(owned.values()))
    return []


def test_fork() -> None:
    """A forked process does not have the thread, and does not wait for it."""
    slow, after = Slow(), Slow()
    iterator, late = slow.as_iterator(), after.as_iterator()
    iterators.end_beside(iterator)
    iterators.end_beside(late)
    del iterator
    after.may_end.set()
    child = os.fork()
    if child == 0:
        del late
        os._exit(0 if after.ended.is_set() and after.thread == "MainThread" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slow.may_end.set()
    assert slow.ended.wait(60)


SLOW = """
import time
from keras_distplug.backend.tensorflow.input import iterators

class Resource:
    def __del__(self):
        time.sleep(1)
        print("ended", flush=True)

class Iterator:
    def __init__(self):
        self.resource = Resource()

dropped, kept = Iterator(), Iterator()
iterators.end_beside(dropped)
iterators.end_beside(kept)
"""


def test_destruction_that_never_ends() -> None:
    """A destruction that never ends does not keep the process alive forever."""
    script = (
        SLOW.replace("time.sleep(1)", "time.sleep(9999)") + "iterators._ENDING_S = 1\ndel dropped\n"
    )
    subprocess.run(
        [sys.executable, "-c", script + "kept.resource = None\n"], timeout=100, check=True
    )


def test_process_exit() -> None:
    """The interpreter waits for running destructions at its exit, but not for iterators in use."""
    done = subprocess.run(
        [sys.executable, "-c", SLOW + "del dropped\nprint('over', flush=True)\n"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "over\nended\nended\n"), done.stderr
