"""Variables read by reference, several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_distplug.backend.tensorflow.runtime import reading  # noqa: E402

VALUES = [1.5, [1, 2, 3], [[True, False]], "text", np.ones([2, 3], "float64"), 2 + 1j, [], [7] * 9]


def variables(count: int = 150) -> list[tf.Variable]:
    made = []
    for number in range(count):
        with tf.device(f"CPU:{number % 2}"):
            made.append(tf.Variable(VALUES[number % len(VALUES)]))
    return made


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of all dtypes and devices are read in few operations, in the variables' order."""
    every, calls = variables(), []
    stock = reading.execute.execute

    def execute(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return stock(*args, **kwargs)

    monkeypatch.setattr(reading.execute, "execute", execute)
    with tf.device("CPU:1"):
        read = reading.read_all_by_reference(every)
    assert len(calls) == 4  # two per device
    for value, variable in zip(read, every, strict=True):
        assert value.dtype == variable.dtype
        np.testing.assert_array_equal(value.numpy(), variable.numpy())
    assert reading.read_all_by_reference([]) == []


UPDATES: dict[str, Callable[[tf.Variable], Any]] = {
    "assign": lambda variable: variable.assign(-variable),
    "add": lambda variable: variable.assign_add(tf.ones_like(variable)),
    "scatter": lambda variable: variable.scatter_sub(tf.IndexedSlices(tf.ones([1, 2]), [1])),
    "optimizer": lambda variable: tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=1.0, delta=tf.ones_like(variable)
    ),
}


@pytest.mark.parametrize("name", UPDATES)
def test_later_updates(name: str) -> None:
    """Later updates do not change values that were read, whatever updates came before."""
    update = UPDATES[name]
    changing = [tf.Variable(tf.random.normal([3, 2])) for _ in range(3)]
    for _ in range(3):
        before = [each.numpy().copy() for each in changing]
        read = reading.read_all_by_reference(changing)
        for each in changing:
            update(each)
        for was, value, each in zip(before, read, changing, strict=True):
            np.testing.assert_array_equal(value.numpy(), was)
            assert (each.numpy() != was).any()


def test_other_variables() -> None:
    """A function reads variables in every call; under a strategy, they have their values, too."""
    here = [tf.Variable(1.0), tf.Variable(2.0)]
    read = tf.function(lambda: reading.read_all_by_reference(here))
    assert [float(each) for each in read()] == [1, 2]
    here[0].assign(5.0)
    assert [float(each) for each in read()] == [5, 2]
    here[0].assign(1.0)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        mirrored = tf.Variable(3.0)
    mixed = reading.read_all_by_reference([here[0], mirrored, *mirrored.values])
    assert [float(each) for each in mixed] == [1, 3, 3, 3]
