"""Inputs that a resumed run cannot reproduce: a warning before the first step names a remedy, which
makes them exact."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402
from tensorflow.python.framework import config  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow.input import pipeline  # noqa: E402
from keras_distplug.data import python_sources  # noqa: E402
from keras_distplug.python_state import object_states  # noqa: E402

D = tf.data.Dataset
AUTOTUNE = tf.data.AUTOTUNE
Given = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An input, and the arguments of `fit` after the advice was followed.

    Args:
        warned: The message, as a pattern.
        given: Makes the arguments of `fit` that cause the warning.
        remedied: Makes them as the message suggests.
        still_warned: True if the remedy cannot be detected, so that the warning remains.
    """

    warned: str
    given: Callable[[], Given]
    remedied: Callable[[], Given]
    still_warned: bool = False


def samples() -> D:
    return D.from_tensor_slices((small.X, small.Y)).shuffle(30, seed=1)


def mapped(function: Callable[..., Any], **given: Any) -> Given:
    return {"x": samples().map(function, **given).batch(8)}


def unseeded(x: tf.Tensor, y: tf.Tensor) -> Any:
    return x + tf.random.uniform([4]), y


def seeded(x: tf.Tensor, y: tf.Tensor) -> Any:
    return x + tf.random.uniform([4], seed=3), y


def stateless() -> Given:
    def augment(sample: Any, seed: tf.Tensor) -> Any:
        noise = tf.random.stateless_uniform([4], tf.stack([seed, seed]))
        return sample[0] + noise, sample[1]

    data = D.zip(samples(), D.random(seed=3, rerandomize_each_iteration=True))
    return {"x": data.map(augment, num_parallel_calls=AUTOTUNE).batch(8)}


def augmented(**given: Any) -> Given:
    noise = keras.layers.GaussianNoise(0.5, seed=3)
    return mapped(lambda x, y: (noise(x, training=True), y), **given)


def with_options(deterministic: bool) -> Given:
    options = tf.data.Options()
    options.deterministic = deterministic
    return {"x": samples().batch(8).with_options(options)}


def interleaved(seed: int | None) -> Given:
    def part(number: tf.Tensor) -> D:
        rows = D.range(10).shuffle(10, seed=seed)
        return rows.map(lambda row: tf.cast(row, tf.int64) + 10 * number)

    rows = D.range(3).interleave(part, cycle_length=3)
    return {"x": rows.map(lambda i: (tf.gather(small.X, i), tf.gather(small.Y, i))).batch(8)}


def called(function: Callable[[np.ndarray], np.ndarray]) -> Given:
    def load(x: tf.Tensor, y: tf.Tensor) -> Any:
        return tf.ensure_shape(tf.numpy_function(function, [x], tf.float32), [4]), y

    return mapped(load)


def counting() -> Callable[[np.ndarray], np.ndarray]:
    calls = iter(range(10**6))
    return lambda x: x + np.float32(next(calls))


def from_generator() -> Given:
    signature = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    batches = D.from_generator(lambda: generated(), output_signature=signature)
    return {"x": batches.apply(tf.data.experimental.assert_cardinality(small.BATCHES))}


def generated(*, is_endless: bool = False) -> Iterator[Any]:
    while True:
        for number in np.random.permutation(small.BATCHES):
            yield small.Batches()[number]
        if not is_endless:
            return


class WithIndices(small.Batches):
    """Shuffles in the way that all messages recommend."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.indices = np.arange(small.BATCHES)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self.indices[index])

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.indices)


_read = {"x": small.X.copy()}  # counts as a cache


class WithGlobalCache(small.Batches):
    def __getitem__(self, index: int) -> Any:
        return _read["x"][8 * index : 8 * index + 8], super().__getitem__(index)[1]

    def on_epoch_end(self) -> None:
        np.random.shuffle(_read["x"])


class WithLargeArray(small.Batches):
    def __init__(self) -> None:
        super().__init__()
        self.x = small.X.copy()

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.x)


class Following(small.Batches):
    """Counts its batches."""

    def __init__(self, numbers: Any) -> None:
        super().__init__()
        self.numbers = numbers

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(self.numbers, int):
            number, self.numbers = self.numbers, self.numbers + 1
        else:
            number = next(self.numbers)
        x, y = super().__getitem__(index)
        return x * np.float32(1 + number), y


class Drawing(small.Batches):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + np.random.normal(size=x.shape).astype("float32"), y


def of_variable(elements: int) -> Given:
    drawn = tf.Variable(tf.zeros([elements]), trainable=False)

    def count(x: tf.Tensor, y: tf.Tensor) -> Any:
        return x + drawn.assign_add(tf.ones([elements]))[0], y

    return mapped(count)


def validated(function: Callable[..., Any]) -> Given:
    return {**mapped(lambda x, y: (x, y)), "validation_data": samples().map(function).batch(8)}


CASES = {
    "random numbers": Case(
        r"training data exactly:\n- map of unseeded \(test_warnings_of_inputs.py, line \d+\): "
        "RandomUniform has no seed. Set one",
        lambda: mapped(unseeded),
        lambda: mapped(seeded),
    ),
    "random numbers, stateless": Case(
        r"better zip the data with `tf.data.Dataset.random\(seed\)`",
        lambda: mapped(unseeded),
        stateless,
    ),
    "random numbers in parallel": Case(
        "RandomUniform runs in parallel calls.* Remove num_parallel_calls",
        lambda: mapped(seeded, num_parallel_calls=AUTOTUNE),
        lambda: mapped(seeded),
    ),
    "a layer in parallel": Case(
        "changes variables .* in parallel calls.* Remove num_parallel_calls",
        lambda: augmented(num_parallel_calls=AUTOTUNE),
        augmented,
    ),
    "order of calls": Case(
        "deterministic=False changes the order of elements. Remove it",
        lambda: mapped(lambda x, y: (2 * x, y), num_parallel_calls=2, deterministic=False),
        lambda: mapped(lambda x, y: (2 * x, y), num_parallel_calls=2),
    ),
    "order in options": Case(
        "options.deterministic=False .* Remove it",
        lambda: with_options(False),
        lambda: with_options(True),
    ),
    "a shuffle inside": Case(
        r"interleave of part .*: its function creates a dataset with a `shuffle` that has no seed. "
        r"Write `shuffle\(..., seed=1\)`",
        lambda: interleaved(None),
        lambda: interleaved(1),
    ),
    "a Python function": Case(
        r"map of load .*: it calls Python .*: make its result depend on its arguments only",
        lambda: called(counting()),
        lambda: called(lambda x: x + x[:1]),
        still_warned=True,
    ),
    "from_generator": Case(
        r"from_generator \(.*\): to resume, the generator is run again .* A keras.utils.PyDataset",
        from_generator,
        lambda: {"x": WithIndices()},
    ),
    "a generator": Case(
        "a Python generator: to resume, .* A keras.utils.PyDataset",
        lambda: {"x": generated(is_endless=True), "steps_per_epoch": small.BATCHES},
        lambda: {"x": WithIndices()},
    ),
    "a large variable": Case(
        "changes a variable of 2 MB, which is not saved. Keep changing values in variables of at "
        "most 1 MB",
        lambda: of_variable(2**19 + 1),
        lambda: of_variable(2),
    ),
    "a global cache": Case(
        "WithGlobalCache.on_epoch_end changed nothing that is saved.* keep such values in "
        "attributes that are numbers, text or arrays, for example in an array of indices",
        lambda: {"x": WithGlobalCache()},
        lambda: {"x": WithIndices()},
    ),
    "a large attribute": Case(
        "WithLargeArray: `x` changes during training, but is too large to save, so .* Shuffle an "
        "array of indices",
        lambda: {"x": WithLargeArray()},
        lambda: {"x": WithIndices()},
    ),
    "hooks while batches are prefetched": Case(
        "with steps_per_epoch, WithIndices.on_epoch_end runs while .* Remove steps_per_epoch",
        lambda: {"x": WithIndices(), "steps_per_epoch": 3},
        lambda: {"x": WithIndices()},
    ),
    "an iterator": Case(
        "Following: `numbers` is an iterator, whose position cannot be saved.* Keep the number of "
        "the next element instead",
        lambda: {"x": Following(itertools.count())},
        lambda: {"x": Following(0)},
    ),
    "workers that draw": Case(
        "Drawing draws random numbers .*workers=2.* Give it workers=1",
        lambda: {"x": Drawing(workers=2)},
        lambda: {"x": Drawing(workers=1)},
    ),
    "a large dataset": Case(
        "the pipeline cannot be inspected: it holds 0 MB of tensors; the limit is 0 MB. "
        "Its order is reproduced if every `shuffle` has a seed",
        lambda: {"x": D.from_tensor_slices((small.X, small.Y)).shuffle(30).batch(8)},
        lambda: {"x": samples().batch(8)},
        still_warned=True,
    ),
    "random numbers of validation": Case(
        "validation data exactly:\n- map of unseeded .*: RandomUniform has no seed. Set one",
        lambda: validated(unseeded),
        lambda: validated(seeded),
    ),
}


def fit(make: Callable[[], Given], directory: Path, *stop: small.Stop) -> Any:
    model = small.model()
    tf.random.set_seed(None)  # ops without a seed get theirs from it
    backup = kd.BackupAndRestore(directory, save_freq=1, on_busy="wait", delete_checkpoint=False)
    history = model.fit(epochs=3, verbose=0, **make(), callbacks=[*stop, backup])
    return small.state(model), history.history


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Returns the warnings and messages about input so far."""
    found: list[str] = []
    monkeypatch.setattr(python_sources, "announce", found.append)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, *_, **__: found.append(str(message))
        )
        yield found


@pytest.mark.parametrize("name", CASES)
def test_advice_helps(
    name: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the fault, and following it makes a resumed run exact."""
    case = CASES[name]
    if name == "a large attribute":
        monkeypatch.setattr(object_states, "MOST_BYTES", 200)
    if name == "a large dataset":
        monkeypatch.setattr(pipeline, "_MOST_BYTES", 200)
    fit(case.given, tmp_path / "given")
    found = "\n".join(said)
    assert re.search(case.warned, found, re.DOTALL), found
    said.clear()
    whole = fit(case.remedied, tmp_path / "whole")
    for place in [(1, 1), (2, 0)]:
        directory = tmp_path / f"{place}"
        with pytest.raises(small.Interrupted):
            fit(case.remedied, directory, small.Stop(*place))
        np.random.seed(99), _read["x"].sort(0)  # another process starts with another state
        assert fit(case.remedied, directory) == whole, place
    found = "\n".join(said)
    assert bool(re.search(case.warned, found, re.DOTALL)) == case.still_warned, found
    if not case.still_warned:
        assert "exactly" not in found


def test_op_determinism(said: list[str], tmp_path: Path) -> None:
    """Parallel random numbers are exact, and cause no warning, with TensorFlow's op determinism."""
    tf.config.experimental.enable_op_determinism()
    try:
        for make in (CASES["random numbers in parallel"], CASES["a layer in parallel"]):
            directory = tmp_path / make.warned[:7]
            whole = fit(make.given, directory / "whole")
            with pytest.raises(small.Interrupted):
                fit(make.given, directory, small.Stop(1, 1))
            assert fit(make.given, directory) == whole
    finally:
        config.disable_op_determinism()
    assert "exactly" not in "\n".join(said)
