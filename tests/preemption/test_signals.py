"""Signals that are handed over to the previous handler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from keras_distplug.preemption import signal_watch
from keras_distplug.preemption.signal_watch import SignalWatch

NUMBER = signal.SIGUSR1


class Received(Exception):
    pass


def handler(number: int, frame: Any) -> None:
    raise Received


@pytest.fixture
def watch() -> Iterator[SignalWatch]:
    before = signal.signal(NUMBER, handler)
    made = SignalWatch([NUMBER], lambda number: None, lambda frame: True)
    made.install()
    yield made
    made.remove()
    signal.signal(NUMBER, before)


class Kills:
    """Sends signals, except the first ones."""

    def __init__(self, lost: int) -> None:
        self.stock = signal.pthread_kill
        self.lost = lost
        self.sent = 0

    def __call__(self, thread: int, number: int) -> None:
        self.sent += 1
        if self.sent > self.lost:
            self.stock(thread, number)


@pytest.mark.parametrize("lost", [0, 2])
def test_handed_over(lost: int, watch: SignalWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread receives the signal during a wait, if necessary at the next attempt.

    A signal that arrives just before a wait does not end it.
    """
    monkeypatch.setattr(signal_watch, "_REPEAT_SECS", 0.2)
    monkeypatch.setattr(signal, "pthread_kill", kills := Kills(lost))
    thread = threading.Thread(target=watch.run_previous_handler, args=(NUMBER,))

    def wait() -> None:
        thread.start()
        assert not threading.Event().wait(60), "the signal was not received"

    with pytest.raises(Received):
        wait()
    thread.join(30)
    assert not thread.is_alive()
    assert kills.sent == lost + 1
    assert signal.getsignal(NUMBER) is handler


def test_later_handler(watch: SignalWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later handler that does not call the previous one receives the signal once."""
    monkeypatch.setattr(signal_watch, "_REPEAT_SECS", 0.2)
    numbers: list[int] = []
    came = threading.Event()

    def later(number: int, frame: Any) -> None:
        numbers.append(number)
        came.set()

    signal.signal(NUMBER, later)
    thread = threading.Thread(target=watch.run_previous_handler, args=(NUMBER,))
    thread.start()
    assert came.wait(30)
    thread.join(30)
    assert not thread.is_alive()
    assert numbers == [NUMBER]
