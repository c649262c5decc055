"""The round-trip times of messages to the chief and back."""

from __future__ import annotations

import pytest

from keras_distplug.replicas.round_trips import PAYLOAD_BYTES, RoundTrips

EMPTY_S, BYTE_S = 0.002, 1e-6


class Line:
    """A network with a simulated clock, on which every message takes its time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.byte_s = BYTE_S
        self.kept: dict[str, str] = {}
        self.heard = 0
        self.noise_s = 0.0

    def send(self, topic: str, text: str) -> None:
        assert topic not in self.kept
        self.kept[topic] = text
        self.now_s += len(text) * self.byte_s

    def receive(self, topic: str, timeout_s: float) -> str:
        self.heard += 1
        self.now_s += EMPTY_S + (self.noise_s if self.heard % 3 else 0)
        return self.kept[topic]

    def forget(self, topic: str) -> None:
        del self.kept[topic]


@pytest.fixture
def line() -> Line:
    return Line()


def trips(line: Line) -> RoundTrips:
    return RoundTrips("a topic", line, every_secs=1, now_s=lambda: line.now_s)


@pytest.mark.parametrize("size", [0, 1000, PAYLOAD_BYTES, 10**8])
@pytest.mark.parametrize("noise_s", [0.0, 0.3])
def test_extrapolation(size: int, noise_s: float, line: Line) -> None:
    """Any size is extrapolated from the times of two sizes, even if some messages are delayed."""
    line.noise_s = noise_s
    found_s, is_new = trips(line).seconds_for(size)
    assert found_s == pytest.approx(EMPTY_S + size * BYTE_S, rel=1e-2)
    assert is_new
    assert line.kept == {}


def test_measurement_interval(line: Line) -> None:
    """A measurement is not repeated before its interval has passed."""
    made = trips(line)
    first_s, _ = made.seconds_for(10**6)
    heard = line.heard
    line.byte_s *= 10
    assert made.seconds_for(10**6) == (first_s, False)
    assert line.heard == heard
    line.now_s += 1
    second_s, is_new = made.seconds_for(10**6)
    assert second_s > 3 * first_s
    assert is_new
