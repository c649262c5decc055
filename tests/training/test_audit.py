"""What of a pipeline cannot be had again is named, with the transformation and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import tensorflow as tf  # noqa: E402

from keras_distplug.training.audit import audit  # noqa: E402

D = tf.data.Dataset


@cache
def generator() -> tf.random.Generator:
    return tf.random.Generator.from_seed(1)


def disordered() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = False
    return options


def uniform(number: tf.Tensor) -> tf.Tensor:
    return tf.random.uniform([])


def seeded(number: tf.Tensor) -> tf.Tensor:
    return tf.random.normal([], seed=3)


def of_a_generator(number: tf.Tensor) -> tf.Tensor:
    return generator().uniform([])


def shuffled(number: tf.Tensor) -> tf.data.Dataset:
    return D.range(3).shuffle(3)


def python(number: tf.Tensor) -> tf.Tensor:
    return tf.py_function(lambda i: i, [number], tf.int64)


def numbers() -> tf.data.Dataset:
    return D.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int64))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: D.range(3).map(uniform), "map: RandomUniform has no seed.*Dataset.random"),
        (lambda: D.range(3).filter(lambda i: uniform(i) > 0.5), "filter: RandomUniform has no"),
        (
            lambda: D.range(3).map(seeded, num_parallel_calls=2),
            "map: RandomStandardNormal in parallel calls.*enable_op_determinism",
        ),
        (lambda: D.range(3).map(of_a_generator), "map: .*tf.random.Generator.*stateless"),
        (
            lambda: D.range(3).map(lambda i: i, num_parallel_calls=2, deterministic=False),
            "map: deterministic=False changes the order",
        ),
        (
            lambda: D.range(3).interleave(
                lambda i: D.range(2), num_parallel_calls=2, deterministic=False
            ),
            "interleave: deterministic=False changes the order",
        ),
        (
            lambda: D.range(3).with_options(disordered()),
            "options.deterministic=False .*Leave",
        ),
        (lambda: D.range(3).interleave(shuffled), r"interleave: .*Write `shuffle\(..., seed=1\)`"),
        (lambda: D.range(3).map(python), r"map: it calls Python \(EagerPyFunc\), which is called"),
        (numbers, r"flat_map: it calls Python \(PyFunc\)"),
    ],
)
def test_what_cannot_be_had_again(make: Callable[[], tf.data.Dataset], line: str) -> None:
    """One line names it."""
    generator()
    [found] = audit(make())
    assert re.match(line, found), found


@pytest.mark.parametrize(
    "make",
    [
        lambda: D.range(3).shuffle(3, seed=1).batch(2).prefetch(1),
        lambda: D.range(3).shuffle(3),
        lambda: D.range(3).map(seeded),
        lambda: D.range(3).interleave(lambda i: D.range(3).shuffle(3, seed=1)),
        lambda: D.zip(D.range(3), D.random(1)).map(
            lambda i, s: tf.random.stateless_uniform([], tf.stack([s, s])), num_parallel_calls=2
        ),
    ],
)
def test_what_can(make: Callable[[], tf.data.Dataset]) -> None:
    """Nothing is said of what comes again."""
    assert audit(make()) == []
