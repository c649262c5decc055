"""Scores of a norm or a loss, compared with previous ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

import tensorflow as tf  # noqa: E402

from keras_distplug.nonfinite.spikes import WINDOW, Window  # noqa: E402


def learned(values: list[float], *, by_logarithm: bool = True) -> Window:
    known = Window(by_logarithm=by_logarithm)
    for value in values:
        known.learn_if(tf.constant(True), tf.constant(value))
    return known


def test_score() -> None:
    """The score is the distance of logarithms from their median, in robust standard deviations."""
    draws = np.exp(np.random.default_rng(0).normal(1.0, 0.5, 101)).astype("float32").tolist()
    logs = np.log(draws)
    spread = 1.4826 * np.median(np.abs(logs - np.median(logs)))
    found = float(learned(draws).score(tf.constant(100.0)))
    assert found == pytest.approx((math.log(100.0) - np.median(logs)) / spread, rel=1e-4)


def test_score_of_a_loss() -> None:
    """The score uses the values, which may be negative; a value below the others is not an
    outlier."""
    draws = np.random.default_rng(0).normal(-5.0, 2.0, 101).astype("float32")
    spread = 1.4826 * np.median(np.abs(draws - np.median(draws)))
    known = learned(draws.tolist(), by_logarithm=False)
    for loss in (30.0, -60.0):
        expected = (loss - np.median(draws)) / spread
        assert float(known.score(tf.constant(loss))) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("losses", "loss"), [([0.0] * 50, 0.5), ([7.0] * 50, 7.5), ([-7.0] * 50, 0.0)]
)
def test_small_differences_of_losses(losses: list[float], loss: float) -> None:
    """If all values are the same, a slightly larger one is not an outlier; if all are 0, none
    is."""
    found = float(learned(losses, by_logarithm=False).score(tf.constant(loss)))
    assert found < (1 if loss else 11)


def test_too_few_values() -> None:
    """The score is 0 for the first 32 values."""
    assert float(learned([1.0] * 31).score(tf.constant(1e9))) == 0.0
    assert float(learned([1.0] * 32).score(tf.constant(1e9))) > 100


def test_small_differences() -> None:
    """If all values are the same, a slightly larger one is not an outlier."""
    assert float(learned([1.0] * 50).score(tf.constant(1.1))) < 1


def test_nonfinite_values() -> None:
    """NaN and infinity have a score above any limit, and are not learned."""
    known = learned([1.0] * 40)
    for norm in (math.nan, math.inf):
        score = known.score(tf.constant(norm))
        assert not bool(score <= 1e30)
        known.learn_if(score <= 1e30, tf.constant(norm))
    assert known.state() == [0.0] * 40


@pytest.mark.parametrize("many", [3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 7])
def test_state(many: int) -> None:
    """A window continues from its state as if it had not been interrupted."""
    norms = [float(number) for number in range(1, many + 1)]
    known, other = learned(norms), Window(by_logarithm=True)
    assert known.state() == pytest.approx([math.log(norm) for norm in norms][-WINDOW:], rel=1e-6)
    other.set_state(known.state())
    for each in (known, other):
        for norm in (5.0, 6.0, 7.0):
            each.learn_if(tf.constant(True), tf.constant(norm))
    assert other.state() == known.state()
    assert float(other.score(tf.constant(9.0))) == float(known.score(tf.constant(9.0)))
