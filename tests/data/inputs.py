"""Sources that yield the numbers of samples, shuffled in all ways. Imports TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.data import python_sources, sources
from keras_distplug.data.position import Source

SAMPLES, BATCH = 30, 4
D = tf.data.Dataset
IDS = np.arange(SAMPLES)


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = IDS[BATCH * index : BATCH * (index + 1)]
        return ids, ids / 7


class EndlessBatches(Batches):
    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return super().__getitem__(index % 8)


def batches() -> Iterator[Any]:
    for number in range(8):
        yield Batches()[number]


def halves(number: tf.Tensor) -> tf.data.Dataset:
    return D.range(15 * number, 15 * number + 15).shuffle(15, seed=2)


def with_random(seed: int, **more: Any) -> tf.data.Dataset:
    return D.zip(D.range(SAMPLES).shuffle(10, seed=1), D.random(seed, **more)).map(
        lambda i, s: (i, tf.random.stateless_uniform([2], tf.stack([s, s]))),
        num_parallel_calls=2,
    )


def to_text(number: tf.Tensor) -> tf.Tensor:
    return tf.strings.as_string(number)


def from_text(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_number(text, tf.int64)


def with_uniform(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(lambda i: (i, tf.random.uniform([2], seed=3)))


def python(number: tf.Tensor) -> tf.Tensor:
    called = tf.py_function(lambda i: i, [number], tf.int64)
    called.set_shape([])
    return called


def numbers() -> tf.data.Dataset:
    return D.range(SAMPLES)


def shuffled(seed: int = 1) -> tf.data.Dataset:
    return numbers().shuffle(10, seed=seed)


def names() -> tf.data.Dataset:
    """Returns more than 1 KB of text, like file names."""
    return D.from_tensor_slices([f"a/folder/of/{'images' * 8}/{number:05d}.png" for number in IDS])


def number_of(name: tf.Tensor) -> tf.Tensor:
    return from_text(tf.strings.substr(name, -9, 5))


def ragged() -> tf.data.Dataset:
    rows = tf.RaggedTensor.from_row_lengths(np.arange(435), IDS)
    return D.from_tensor_slices((IDS, rows))


def sparse() -> tf.data.Dataset:
    return D.from_tensor_slices((IDS, tf.sparse.from_dense(np.eye(SAMPLES))))


def dense(number: tf.Tensor, row: Any) -> Any:
    is_ragged = isinstance(row, tf.RaggedTensor)
    return number, row.to_tensor(shape=(None, 2)) if is_ragged else tf.sparse.to_dense(row)


def with_table(dataset: tf.data.Dataset) -> tf.data.Dataset:
    keys = [f"{'word ' * 20}{number}" for number in IDS]
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, IDS), -1)
    return dataset.map(lambda i: table.lookup("word " * 20 + tf.strings.as_string(i)))


def with_layers(dataset: tf.data.Dataset) -> tf.data.Dataset:
    layers = [keras.layers.GaussianNoise(1.0, seed=4), keras.layers.Dropout(0.5, seed=5)]

    def noisy(number: tf.Tensor) -> Any:
        drawn = tf.ones([2])
        for layer in layers:
            drawn = layer(drawn, training=True)
        return number, drawn

    return dataset.map(noisy)


def with_generator(dataset: tf.data.Dataset) -> tf.data.Dataset:
    generator = tf.random.Generator.from_seed(3)
    return dataset.map(lambda i: (i, generator.normal([2])))


def with_counter(dataset: tf.data.Dataset) -> tf.data.Dataset:
    count = tf.Variable(0, dtype=tf.int64)

    def counted(number: tf.Tensor) -> Any:
        return number, count.assign_add(1)

    return dataset.filter(lambda i: i != count % 3).map(counted)


# Their functions change variables, so that a pass depends on earlier reads.
CHANGING: dict[str, Callable[[], tf.data.Dataset]] = {
    "layers": lambda: with_layers(numbers()).batch(BATCH),
    "shuffle, layers": lambda: with_layers(shuffled()).batch(BATCH).prefetch(2),
    "layers, shuffle": lambda: with_layers(numbers()).shuffle(10, seed=1).batch(BATCH),
    "shuffle, batch, layers": lambda: with_layers(shuffled().batch(BATCH)),
    "layers, zip": lambda: D.zip(with_layers(shuffled()), with_layers(numbers())).batch(BATCH),
    "generator of TensorFlow": lambda: with_generator(shuffled()).batch(BATCH),
    "counter": lambda: with_counter(shuffled()).batch(BATCH),
    "layers in flat_map": lambda: (
        D.range(2).flat_map(lambda i: D.from_tensors(i).repeat(15)).apply(with_layers).batch(BATCH)
    ),
}

PIPELINES: dict[str, Callable[[], tf.data.Dataset]] = {
    "in order": lambda: numbers().batch(BATCH),
    "shuffle": lambda: shuffled().batch(BATCH),
    "shuffle once": lambda: numbers().shuffle(9, 1, reshuffle_each_iteration=False).batch(BATCH),
    "shuffle of tensors": lambda: D.from_tensor_slices(IDS).shuffle(10, seed=1).batch(BATCH),
    "shuffle of large tensors": lambda: (
        D.from_tensor_slices((IDS, np.ones([SAMPLES, 500]))).shuffle(10, seed=1).batch(BATCH)
    ),
    "shuffle, repeat": lambda: shuffled().repeat(3).batch(BATCH),
    "shuffle, repeat for ever": lambda: shuffled().batch(BATCH).repeat(),
    "repeat, shuffle": lambda: numbers().repeat(2).shuffle(10, seed=1).batch(BATCH),
    "shuffle, shuffle": lambda: shuffled().shuffle(10, seed=2).batch(BATCH),
    "files": lambda: (
        D.range(2)
        .shuffle(2, seed=1)
        .interleave(halves, num_parallel_calls=2, deterministic=True)
        .shuffle(10, seed=4)
        .batch(BATCH)
    ),
    "interleave": lambda: D.range(2).interleave(halves, cycle_length=2).batch(BATCH),
    "concatenate": lambda: shuffled().concatenate(shuffled(2)).batch(BATCH),
    "zip": lambda: D.zip(shuffled(), shuffled(2)).batch(BATCH),
    "take and skip": lambda: shuffled().skip(3).take(20).batch(BATCH),
    "map": lambda: shuffled().batch(BATCH).map(lambda i: (i, 2 * i), num_parallel_calls=2),
    "map, shuffle, map": lambda: (
        numbers().map(lambda i: 2 * i).map(to_text).shuffle(9, seed=1).map(from_text).batch(BATCH)
    ),
    "map, shuffle, repeat, map": lambda: (
        D.from_tensor_slices((IDS, IDS / 7))
        .map(lambda i, x: {"i": i, "x": tf.fill([3], x)}, num_parallel_calls=2)
        .prefetch(2)
        .shuffle(9, seed=1)
        .repeat(2)
        .shuffle(4, seed=2)
        .map(lambda each: (each["i"], tf.reduce_sum(each["x"])))
        .batch(BATCH, num_parallel_calls=2)
        .map(lambda i, x: (i, x + tf.reduce_mean(x)))
        .prefetch(1)
    ),
    "shuffle, batch, map, shuffle": lambda: (
        shuffled().batch(BATCH).map(lambda i: i + 1).shuffle(3, seed=3)
    ),
    "map, random dataset": lambda: with_random(7).batch(BATCH),
    "map, new random dataset": lambda: with_random(7, rerandomize_each_iteration=True).batch(BATCH),
    "map, stateful op": lambda: with_uniform(shuffled()).batch(BATCH),
    "map of batches, stateful op": lambda: with_uniform(shuffled().batch(BATCH)),
    "filter": lambda: shuffled().filter(lambda i: i % 3 > 0).batch(BATCH),
    "scan": lambda: (
        shuffled().scan(tf.constant(0, tf.int64), lambda s, i: (s + i, (i, s))).batch(BATCH)
    ),
    "cache, shuffle": lambda: numbers().cache().shuffle(10, seed=1).batch(BATCH),
    "shuffle, cache": lambda: shuffled().cache().batch(BATCH),
    "shuffle, batch, cache": lambda: shuffled().batch(BATCH).cache(),
    "prefetch": lambda: shuffled().batch(BATCH).prefetch(2),
    "unbatch": lambda: numbers().batch(6).shuffle(3, seed=1).unbatch().batch(BATCH),
    "sample": lambda: (
        D.sample_from_datasets([numbers().repeat(), shuffled().repeat()], [0.5, 0.5], seed=3)
        .take(SAMPLES)
        .batch(BATCH)
    ),
    "py_function": lambda: shuffled().map(python).batch(BATCH),
    "from_generator": lambda: (
        D.from_generator(lambda: iter(IDS), output_signature=tf.TensorSpec([], tf.int64))
        .shuffle(10, seed=1)
        .batch(BATCH)
    ),
    "names in order": lambda: names().map(number_of).batch(BATCH),
    "names, shuffle": lambda: names().shuffle(9, seed=1).map(number_of).batch(BATCH),
    "ragged": lambda: ragged().batch(BATCH).map(dense),
    "ragged, shuffle": lambda: ragged().shuffle(9, seed=1).batch(BATCH).map(dense),
    "sparse": lambda: sparse().batch(BATCH).map(dense),
    "sparse, shuffle": lambda: sparse().shuffle(9, seed=1).batch(BATCH).map(dense),
    "table": lambda: with_table(numbers()).batch(BATCH),
    "shuffle, table": lambda: with_table(shuffled()).batch(BATCH),
    "no seed": lambda: numbers().shuffle(10).batch(BATCH),
    "no seed, repeat": lambda: numbers().shuffle(10).repeat().shuffle(5).batch(BATCH),
}

SOURCES: dict[str, Callable[[], Source]] = {
    name: lambda make=make: sources.TfData(make(), seed=5) for name, make in PIPELINES.items()
} | {
    "arrays": lambda: sources.Arrays((IDS, IDS / 7), BATCH, seed=1),
    "arrays in order": lambda: sources.Arrays((IDS, IDS / 7), BATCH, seed=None),
    "arrays, nested": lambda: sources.Arrays(({"a": IDS, "b": [IDS]}, IDS), BATCH, seed=2**40),
    "arrays, class weights": lambda: sources.Arrays((IDS, IDS % 2), BATCH, 1, {0: 0.5, 1: 2.0}),
    "PyDataset": lambda: python_sources.PyData(Batches(), shuffle=True, seed=1),
    "PyDataset in order": lambda: python_sources.PyData(Batches(), shuffle=False, seed=1),
    "PyDataset, threads": lambda: python_sources.PyData(Batches(workers=2), shuffle=True, seed=1),
    "PyDataset, endless": lambda: python_sources.PyData(EndlessBatches(), shuffle=True, seed=1),
    "PyDataset, endless, threads": lambda: python_sources.PyData(
        EndlessBatches(workers=2), shuffle=True, seed=1
    ),
    "generator function": lambda: python_sources.Generator(batches),
    "generator object": lambda: python_sources.Generator(batches()),
}
# Every pass holds all samples.
SHUFFLED = [
    "arrays",
    "PyDataset",
    "shuffle",
    "shuffle, shuffle",
    "files",
    "cache, shuffle",
    "py_function",
    "from_generator",
    "no seed",
]
# A shuffle before `repeat` draws by the number of the pass; two shuffles, when they are read.
BY_PASS = ["shuffle, repeat", "shuffle, repeat for ever"]
BY_READING = ["shuffle, shuffle", "concatenate"]
SEEDED = ["shuffle", "repeat, shuffle", "zip", "map", "map, new random dataset", "shuffle, cache"]


def ids(dataset: tf.data.Dataset, most: int) -> list[Any]:
    """Returns the numbers in the batches of the next pass."""
    return [tf.nest.flatten(batch)[0].numpy().tolist() for batch in dataset.take(most)]
