"""What can be seen of data before any are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_distplug.compat.data import adapter_for, smallest_batch  # noqa: E402

X = np.ones((21, 2))
Change = Callable[[tf.data.Dataset], tf.data.Dataset]


def halved(x: Any) -> Any:
    return x / 2


CHANGES: dict[str, tuple[Change, int | None]] = {
    "tail": (lambda ds: ds.batch(10), 1),
    "no tail": (lambda ds: ds.batch(7), 7),
    "dropped": (lambda ds: ds.batch(10, drop_remainder=True).map(halved), 10),
    "shuffled before": (lambda ds: ds.shuffle(9).map(halved).batch(10).cache().prefetch(2), 1),
    "without an end": (lambda ds: ds.repeat().batch(10), 10),
    "repeated": (lambda ds: ds.batch(10).repeat(), 1),
    "options": (lambda ds: ds.batch(10).with_options(tf.data.Options()), 1),
    "smaller than a batch": (lambda ds: ds.batch(50), 21),
    "unknown length": (lambda ds: ds.filter(lambda x: True).batch(10), None),
    "changed behind": (lambda ds: ds.batch(7).map(halved), None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_smallest_batch(change: str) -> None:
    """It is known where nothing behind `batch` can change it, and never larger than it is."""
    make, expected = CHANGES[change]
    dataset = make(tf.data.Dataset.from_tensor_slices(X))
    assert smallest_batch(adapter_for(dataset)) == expected
    if expected is not None:
        assert min(len(batch) for batch in dataset.take(30)) == expected


@pytest.mark.parametrize(("batch_size", "expected"), [(10, 1), (7, 7), (50, 21)])
def test_smallest_batch_of_arrays(batch_size: int, expected: int) -> None:
    assert smallest_batch(adapter_for(X, y=X, batch_size=batch_size)) == expected


def test_smallest_batch_of_what_only_python_knows() -> None:
    class Parts(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return X, X

    assert smallest_batch(adapter_for(Parts())) is None
    assert smallest_batch(adapter_for((X, X) for _ in range(2))) is None
