"""Irreproducible parts of a pipeline are reported, with the transformation and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import tensorflow as tf  # noqa: E402

from keras_distplug.backend.tensorflow.input import pipeline  # noqa: E402
from keras_distplug.data import advice  # noqa: E402
from keras_distplug.data.audit import audit  # noqa: E402

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
        (
            lambda: D.range(3).map(uniform),
            r"map of uniform \(test_audit.py, line \d+\): RandomUniform has.*Dataset.random",
        ),
        (
            lambda: D.range(3).filter(lambda i: uniform(i) > 0.5),
            r"filter \(test_audit.py, line \d+\): RandomUniform has no",
        ),
        (
            lambda: D.range(3).map(seeded, num_parallel_calls=2),
            "map of seeded .*: RandomStandardNormal runs in parallel.*enable_op_determinism",
        ),
        (
            lambda: D.range(3).map(of_a_generator, num_parallel_calls=2),
            "map of of_a_generator .*: it changes variables .* in parallel.*Remove num_par",
        ),
        (
            lambda: D.range(3).map(lambda i: i, num_parallel_calls=2, deterministic=False),
            r"map \(.*\): deterministic=False changes the order",
        ),
        (
            lambda: D.range(3).interleave(
                lambda i: D.range(2), num_parallel_calls=2, deterministic=False
            ),
            r"interleave \(.*\): deterministic=False changes the order",
        ),
        (
            lambda: D.range(3).with_options(disordered()),
            "options.deterministic=False .*Remove it",
        ),
        (
            lambda: D.range(3).interleave(shuffled),
            r"interleave of shuffled .*Write `shuffle\(..., seed=1\)`",
        ),
        (
            lambda: D.range(3).map(python),
            r"map of python .*: it calls Python \(EagerPyFunc\)\. To resume",
        ),
        (numbers, r"from_generator \(test_audit.py, line \d+\): to resume, the generator is run"),
    ],
)
def test_irreproducible_parts(make: Callable[[], tf.data.Dataset], line: str) -> None:
    """One line names it."""
    generator()
    [found] = audit(pipeline.read(make()))
    assert re.match(line, found), found


@pytest.mark.parametrize(
    "make",
    [
        lambda: D.range(3).shuffle(3, seed=1).batch(2).prefetch(1),
        lambda: D.range(3).shuffle(3),
        lambda: D.range(3).map(seeded),
        lambda: D.range(3).map(of_a_generator),
        lambda: D.range(3).interleave(lambda i: D.range(3).shuffle(3, seed=1)),
        lambda: D.zip(D.range(3), D.random(1)).map(
            lambda i, s: tf.random.stateless_uniform([], tf.stack([s, s])), num_parallel_calls=2
        ),
    ],
)
def test_reproducible_parts(make: Callable[[], tf.data.Dataset]) -> None:
    """Reproducible parts are not reported."""
    generator()
    assert audit(pipeline.read(make())) == []


FILE = tf.data.experimental.AutoShardPolicy.FILE


def sharded_by_file(names: list[str]) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = FILE
    return tf.data.TFRecordDataset(names).batch(2).with_options(options)


def images(number: int = 100, side: int = 8) -> tf.data.Dataset:
    """Decodes images from files."""

    def decoded(name: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_jpeg(tf.io.read_file(name), channels=3)
        return tf.ensure_shape(image, [side, side, 3])

    return D.from_tensor_slices([f"{i}.jpg" for i in range(number)]).map(decoded)


def advised(dataset: tf.data.Dataset, workers: int = 2, epochs: int = 3) -> list[str]:
    return advice.advise(pipeline.read(dataset), dataset, workers=workers, epochs=epochs)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: D.range(90).batch(4).shuffle(9), "`shuffle` comes after `batch`"),
        (
            lambda: D.range(90).batch(4).map(lambda i: i).repeat().shuffle(9).prefetch(1),
            "`shuffle` comes after `batch`",
        ),
        (
            lambda: D.range(90).shuffle(3).map(lambda i: i).batch(8),
            r"`shuffle\(buffer_size=3\)` mixes only 3 .* the 8 of a batch",
        ),
        (lambda: D.range(90).shuffle(90).cache().batch(4), "`shuffle` comes before `cache`"),
        (lambda: images().batch(4), r"`map` decodes .*\(DecodeJpeg\).* 1 MB"),
        (lambda: sharded_by_file(["a"]), ".*FILE.* there are 1 for 2 workers"),
    ],
)
def test_advice(make: Callable[[], tf.data.Dataset], line: str) -> None:
    """One line suggests a change, if the pipeline shows the need."""
    [found] = advised(make())
    assert re.match(line, found), found


@pytest.mark.parametrize(
    "make",
    [
        lambda: D.range(90).shuffle(90).batch(4),
        lambda: D.range(90).shuffle(9).batch(4).shuffle(9),
        lambda: D.range(90).batch(5).shuffle(18).batch(2),  # windows are shuffled
        lambda: D.range(90).batch(5).unbatch().shuffle(9).batch(4),
        lambda: D.range(9).batch(1).shuffle(9),
        lambda: (
            D.range(3).shuffle(3).interleave(lambda i: D.range(90)).batch(8)
        ),  # files are shuffled
        lambda: D.range(6).shuffle(6).batch(8),
        lambda: D.range(90).filter(lambda i: i < 3).shuffle(3).batch(8),
        lambda: D.range(90).shuffle(90).map(lambda i: i).shuffle(3).batch(8),
        lambda: D.range(90).shuffle(90).cache().shuffle(90).batch(4),
        lambda: D.range(90).shuffle(90, reshuffle_each_iteration=False).cache().batch(4),
        lambda: images().cache().batch(4),
        lambda: images(100_000, 224).batch(4),
        lambda: images().map(lambda i: i).repeat().batch(4),
        lambda: sharded_by_file(["a", "b"]),
        lambda: D.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([2])),
        lambda: D.zip(D.range(9).batch(2), D.range(9).batch(2)).shuffle(2),
    ],
)
def test_no_advice(make: Callable[[], tf.data.Dataset]) -> None:
    """Pipelines that may be intended cause no suggestion."""
    assert advised(make()) == []


def test_no_advice_for_one_epoch_or_worker() -> None:
    """Suggestions for epochs, or several workers, are not made without them."""
    made = [D.range(90).shuffle(90).cache().batch(4), images().batch(4), sharded_by_file(["a"])]
    assert [advised(each, workers=1, epochs=1) for each in made] == [[], [], []]


def untuned(dataset: tf.data.Dataset, inject: bool = True) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False
    if not inject:
        options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def test_missing_prefetch() -> None:
    """Only if TensorFlow adds no prefetch, the user has not disabled it, and functions keep no
    state."""
    batches = D.range(9).map(lambda i: i).batch(2)
    found = {
        "tuned": batches,
        "untuned": untuned(batches),
        "not wanted": untuned(batches, inject=False),
        "there": untuned(batches.prefetch(1)),
        "parallel": untuned(batches.map(lambda i: i, num_parallel_calls=2)),
        "python": untuned(batches.map(python)),
    }
    lacks = {name for name, each in found.items() if advice.lacks_prefetch(pipeline.read(each))}
    assert lacks == {"untuned"}


class Sized:
    """A generator function that is an object, and falsy."""

    def __len__(self) -> int:
        return 0

    def __call__(self) -> Iterator[int]:
        return iter([1, 2])


@pytest.mark.parametrize(
    "make",
    [
        lambda: D.range(3).map("{}".format),
        lambda: D.range(3).map(partial(tf.multiply, y=tf.constant(2, tf.int64))),
        lambda: D.range(3).map(tf.keras.layers.Rescaling(2.0)),
        lambda: D.range(3).map(tf.function(lambda i: i + 1)),
        lambda: D.from_generator(Sized(), output_signature=tf.TensorSpec([], tf.int64)),
    ],
)
def test_any_callable(make: Callable[[], tf.data.Dataset]) -> None:
    """Any callable in a pipeline can be named."""
    assert all("to resume" in line for line in audit(pipeline.read(make())))
