"""Iterators that take long to end."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import tensorflow as tf

from keras_distplug.compat import iterators
from keras_distplug.training.position import Positioned
from keras_distplug.training.sources import TfData

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]


class Slow:
    """Ends when it may, and says in which thread."""

    def __init__(self) -> None:
        self.may_end, self.ended = threading.Event(), threading.Event()
        self.thread = [""]

    def as_iterator(self) -> Any:
        slow = self

        class Iterator:
            def __del__(self) -> None:
                slow.thread[0] = threading.current_thread().name
                assert slow.may_end.wait(60)
                slow.ended.set()

        return Iterator()


def test_nobody_waits() -> None:
    """Who drops an iterator does not wait for its end, which comes once nobody has it any more."""
    slow = Slow()
    iterator = slow.as_iterator()
    iterators.end_beside(iterator)
    slow.may_end.set()
    assert not slow.ended.wait(0.2)
    del iterator
    assert slow.ended.wait(60)
    assert slow.thread == ["keras_distplug-iterators"]


def test_passes_over_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each iterator over the data of a `fit` is dropped in this way, when the next one is made or
    the data goes."""
    dropped: list[str] = []
    monkeypatch.setattr(
        "keras_distplug.training.position.end_beside", lambda each: dropped.append(str(next(each)))
    )
    data = Positioned(TfData(tf.data.Dataset.range(9), seed=0))
    first = iter(data)
    assert int(next(first)) == 0
    assert dropped == []
    iter(data)
    assert len(dropped) == 1
    del data
    assert len(dropped) == 2
    assert int(next(first)) == 2


def test_end_of_the_process() -> None:
    """The interpreter does not end before they have."""
    script = (
        "import time\n"
        "from keras_distplug.compat import iterators\n"
        "class Slow:\n"
        "    def __del__(self): time.sleep(1); print('ended', flush=True)\n"
        "iterators.end_beside(Slow())\n"
        "print('over', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "over\nended\n"), done.stderr
