"""Batches as named arrays."""

from __future__ import annotations

import json
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from keras_distplug.nonfinite.batches import join_batch, split_batch

A, B, C = (np.array(value) for value in (1, 2, 3))


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (A, ["x"]),
        ((A,), ["x"]),
        ((A, B), ["x", "y"]),
        ((A, None, C), ["x", "sample_weight"]),
        (({"b": A, "a": (B, [C])}, A), ["x/b", "x/a/0", "x/a/1/0", "y"]),
        ([A, B], ["x/0", "x/1"]),
        ((A, B, C, A), ["x/0", "x/1", "x/2", "x/3"]),
        ({}, []),
        ((({"a/b": A, "a": {"b": B}}),), ["x/a/b", "x/a/b'"]),
        (None, []),
    ],
)
def test_round_trip(batch: Any, names: list[str]) -> None:
    """Arrays are named like the arguments of Keras' steps, and the structure survives JSON."""
    structure, arrays = split_batch(batch)
    assert list(arrays) == names
    assert join_batch(json.loads(json.dumps(structure)), arrays) == batch


@pytest.mark.parametrize(
    ("batch", "received"),
    [
        (({1: A}, B), "string keys in `x`. Received: 1"),
        ((A, "text"), "`y` to be an array.* Received: a value of type str"),
        ((namedtuple("Pair", "a b")(A, B), C), "Received: a value of type Pair"),
    ],
)
def test_other_structures(batch: Any, received: str) -> None:
    with pytest.raises(TypeError, match=received):
        split_batch(batch)
