"""Signals that are handed over to who was there before."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from keras_distplug.preemption import signal_watch
from keras_distplug.preemption.signal_watch import SignalWatch

NUMBER = signal.SIGUSR1


class Heard(Exception):
    pass


def handler(number: int, frame: Any) -> None:
    raise Heard


@pytest.fixture
def watch() -> Iterator[SignalWatch]:
    before = signal.signal(NUMBER, handler)
    made = SignalWatch([NUMBER], lambda number: None, lambda frame: True)
    made.install()
    yield made
    made.remove()
    signal.signal(NUMBER, before)


class Kills:
    """Sends signals, but for the first ones."""

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
    """The main thread hears of it in the middle of a wait, at the latest with the next one: a
    signal that comes before a wait has begun does not end that."""
    monkeypatch.setattr(signal_watch, "_AGAIN_S", 0.2)
    monkeypatch.setattr(signal, "pthread_kill", kills := Kills(lost))
    thread = threading.Thread(target=watch.hand_over, args=(NUMBER,))

    def wait() -> None:
        thread.start()
        assert not threading.Event().wait(60), "it was not heard"

    with pytest.raises(Heard):
        wait()
    thread.join(30)
    assert not thread.is_alive()
    assert kills.sent == lost + 1
    assert signal.getsignal(NUMBER) is handler


def test_handler_that_came_later(watch: SignalWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not ask those before hears it once."""
    monkeypatch.setattr(signal_watch, "_AGAIN_S", 0.2)
    numbers: list[int] = []
    came = threading.Event()

    def later(number: int, frame: Any) -> None:
        numbers.append(number)
        came.set()

    signal.signal(NUMBER, later)
    thread = threading.Thread(target=watch.hand_over, args=(NUMBER,))
    thread.start()
    assert came.wait(30)
    thread.join(30)
    assert not thread.is_alive()
    assert numbers == [NUMBER]
