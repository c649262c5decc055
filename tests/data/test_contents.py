"""Fingerprints that distinguish the samples of a training from others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import numpy as np  # noqa: E402
import scipy.sparse  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_distplug.data import contents  # noqa: E402
from keras_distplug.data.contents import CONTENTS, ORDER  # noqa: E402

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
Y = np.arange(64)
LARGE = np.random.default_rng(1).normal(size=(40_000, 64)).astype("float32")  # 10 MB
BACKWARDS = np.arange(64)[::-1]


def changed(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values[7] += 1
    return values


def test_arrays() -> None:
    """Parts have separate fingerprints, and one for both together; another order is the same
    contents."""
    found = contents.fingerprint_arrays((X, Y))
    assert contents.fingerprint_arrays((X.copy(), Y.copy())) == found
    other_x, other_y = (
        contents.fingerprint_arrays((changed(X), Y)),
        contents.fingerprint_arrays((X, changed(Y))),
    )
    assert {name for name in found if other_x[name] != found[name]} == {
        CONTENTS,
        ORDER,
        "contents of x",
    }
    assert {name for name in found if other_y[name] != found[name]} == {
        CONTENTS,
        ORDER,
        "contents of y",
    }
    reordered = contents.fingerprint_arrays((X[BACKWARDS], Y[BACKWARDS]))
    assert {name for name in found if reordered[name] != found[name]} == {ORDER}
    # Other labels for the same samples: only the combination differs.
    swapped = contents.fingerprint_arrays((X, Y[BACKWARDS]))
    assert {name for name in found if swapped[name] != found[name]} == {CONTENTS, ORDER}


@pytest.mark.parametrize("width", [0, 1, 3, 64, 500])
def test_rows(width: int) -> None:
    """Every byte of every row matters, whatever the length of the rows."""
    x = np.random.default_rng(2).integers(0, 256, (64, width)).astype("uint8")
    found = contents.fingerprint_arrays((x,))
    reordered = contents.fingerprint_arrays((x[BACKWARDS],))
    assert contents.fingerprint_arrays((np.asfortranarray(x),)) == found
    assert reordered[CONTENTS] == found[CONTENTS]
    assert (reordered[ORDER] != found[ORDER]) == bool(width)
    assert contents.fingerprint_arrays((x[:-1],)) != found
    for place in range(width):
        other = x.copy()
        other[9, place] ^= 1
        assert contents.fingerprint_arrays((other,))[CONTENTS] != found[CONTENTS]


def test_large_arrays() -> None:
    """Rows spread evenly over them are compared."""
    found = contents.fingerprint_arrays((LARGE,))
    assert found.keys() == {CONTENTS}
    assert contents.fingerprint_arrays((LARGE.copy(),)) == found
    assert contents.fingerprint_arrays((LARGE * 2,)) != found
    assert contents.fingerprint_arrays((LARGE[:-1],)) != found


KINDS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: tf.constant(X),
    "sparse": lambda: tf.sparse.from_dense(np.eye(5, dtype="float32")),
    "ragged": lambda: tf.ragged.constant([[1, 2], [3], []]),
    "objects": lambda: np.array(["a", "b"], object),
    "texts": lambda: np.array(["a", "b"]),
    "bytes": lambda: np.array([b"\xff", b"b"], object),
    "scipy": lambda: scipy.sparse.csr_array(np.eye(5, dtype="float32")),
    "no samples": lambda: np.zeros((0, 3)),
    "no features": lambda: np.zeros((3, 0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    found = contents.fingerprint_arrays((KINDS[kind](),))
    assert contents.fingerprint_arrays((KINDS[kind](),)) == found
    assert found


def test_scipy() -> None:
    """A sparse matrix of SciPy is compared by its rows, in any format."""
    matrix = scipy.sparse.random_array((64, 10), density=0.3, format="csr", rng=1)
    found = contents.fingerprint_arrays((matrix,))
    assert contents.fingerprint_arrays((matrix.tocoo(),)) == found
    assert contents.fingerprint_arrays((matrix.toarray(),)) == found
    assert contents.fingerprint_arrays((matrix * 2,))[CONTENTS] != found[CONTENTS]
    assert contents.fingerprint_arrays((matrix[BACKWARDS],))[CONTENTS] == found[CONTENTS]
    assert contents.fingerprint_arrays((matrix[BACKWARDS],))[ORDER] != found[ORDER]


def test_unknown() -> None:
    """If a part is not an array, the whole is unknown."""
    assert contents.fingerprint_arrays((X, 3)) == {}
    assert contents.fingerprint_given(lambda: X) == {}
    assert contents.fingerprint_given(iter([X])) == {}


def test_arrays_that_cannot_be_read() -> None:
    """Unreadable arrays are unknown, and do not cause a failure."""

    class Strange:
        shape, dtype = (3, 2), None

        def __getitem__(self, place: Any) -> Any:
            raise RuntimeError("on another device")

        __array__ = __getitem__

    assert contents.fingerprint_arrays((Strange(), Y)) == {}
    assert contents.fingerprint_given(Strange()) == {}


def test_files_in_another_folder() -> None:
    """Nodes may unpack data in different folders: only the names and the number of the files
    count."""

    def of(folder: str, *names: str) -> Any:
        files = tf.data.Dataset.from_tensor_slices([f"{folder}/{name}" for name in names])
        return contents.fingerprint_given(files.interleave(tf.data.TFRecordDataset).batch(4))

    found = of("/scratch/job-1/shards", "a.tfrecord", "b.tfrecord")
    assert of("/tmp/x", "a.tfrecord", "b.tfrecord") == found
    assert of("/tmp/x", "a.tfrecord", "c.tfrecord") != found
    assert of("/tmp/x", "a.tfrecord", "b.tfrecord", "c.tfrecord") != found


PIPELINES = {
    "slices": lambda x: tf.data.Dataset.from_tensor_slices(x).batch(8),
    "shuffled": lambda x: tf.data.Dataset.from_tensor_slices(x).shuffle(64).batch(8),
    "gathered": lambda x: tf.data.Dataset.range(64).map(lambda i: tf.gather(x, i)).batch(8),
    "zipped": lambda x: tf.data.Dataset.zip(
        tf.data.Dataset.from_tensor_slices(x), tf.data.Dataset.range(64)
    ).batch(8),
    "whole": lambda x: tf.data.Dataset.from_tensors(x).unbatch().batch(8),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name: str) -> None:
    """The tensors that they are made from count; names that TensorFlow numbers, and seeds, do
    not."""
    made = PIPELINES[name]
    found = contents.fingerprint_given(made(X))
    assert found
    assert contents.fingerprint_given(made(X)) == found
    assert contents.fingerprint_given(made(changed(X)))[CONTENTS] != found[CONTENTS]


def test_generators() -> None:
    """Generators have no known difference."""
    spec = tf.TensorSpec([3], tf.float32)

    def of() -> Any:
        made = tf.data.Dataset.from_generator(lambda: iter(X), output_signature=spec)
        return contents.fingerprint_given(made.batch(8))

    assert of() == of()


def test_objects() -> None:
    """Arrays and lists of texts that an object holds, at some depth."""
    held = SimpleNamespace(x=X, files=["a", "b"], seed=3, inner=SimpleNamespace(y=[Y]))
    found = contents.fingerprint_object(held)
    held.seed = 4
    assert contents.fingerprint_object(held) == found
    for name, other in {"x": changed(X), "files": ["a", "c"], "inner": None}.items():
        assert (
            contents.fingerprint_object(SimpleNamespace(**{**vars(held), name: other})) != found
        ), name
    held.held = held
    assert contents.fingerprint_object(held) == found
