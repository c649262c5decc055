"""Masked updates of all Keras optimizers, which change nothing if a step is skipped."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support.optimizers import OPTIMIZERS  # noqa: E402

from keras_distplug.backend.tensorflow.replicas import masked  # noqa: E402


def made(name: str) -> tuple[keras.optimizers.Optimizer, list[keras.Variable]]:
    # Weight decay, which some do not use, changes weights outside the optimizer's own methods.
    kind = getattr(keras.optimizers, name)
    optimizer = kind(0.1, weight_decay=0.01)
    shapes = [(4, 3), (3,), (5, 2)]
    variables = [
        keras.Variable(np.random.default_rng(i).normal(size=shape), dtype="float32", name=f"v{i}")
        for i, shape in enumerate(shapes)
    ]
    optimizer.build(variables)
    return optimizer, variables


def gradients(value: float) -> list[Any]:
    rows = tf.IndexedSlices(tf.fill([2, 2], value), tf.constant([1, 3]), tf.constant([5, 2]))
    return [tf.fill([4, 3], value), tf.fill([3], value), rows]


def state(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> list[bytes]:
    return [each.numpy().tobytes() for each in [*optimizer.variables, *variables]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    """Not a bit changes if a step is skipped; otherwise the update is the usual one."""
    optimizer, variables = made(name)
    stock, stock_variables = made(name)
    assert masked.knows(optimizer)

    @tf.function
    def update(ok: tf.Tensor, value: tf.Tensor) -> None:
        with masked.masked_updates(ok, [*optimizer.variables, *variables]):
            optimizer.apply(gradients(value), variables)

    @tf.function
    def as_always(value: tf.Tensor) -> None:
        stock.apply(gradients(value), stock_variables)

    for value in (0.5, -0.25):
        try:
            as_always(tf.constant(value))
        except AttributeError:  # Muon of Keras 3.10 uses the `path` of a tf.Variable
            pytest.skip("Keras' own version does not work on TensorFlow")
        update(tf.constant(True), tf.constant(value))
        before = state(optimizer, variables)
        assert before == state(stock, stock_variables)
        update(tf.constant(False), tf.constant(float("nan")))
        assert state(optimizer, variables) == before


def test_custom_optimizers() -> None:
    """Custom optimizers are not supported, because they may do anything."""

    class Own(keras.optimizers.SGD):
        pass

    assert not masked.knows(Own())


def test_patches_are_removed() -> None:
    """After a masked update, variables change as usual."""
    optimizer, variables = made("Adam")
    with masked.masked_updates(tf.constant(False), variables):
        optimizer.apply(gradients(1.0), variables)
    before = variables[0].numpy()
    variables[0].assign(before + 1)
    assert (variables[0].numpy() == before + 1).all()
