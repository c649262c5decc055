"""Gradients as optimizers are given them: tensors, some of which say only what is not 0."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf


def dense(gradient: Any) -> tf.Tensor:
    """The values of a gradient."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def size_of(gradient: Any) -> float:
    """How many values it has; infinite if that is not known."""
    shape = dense(gradient).shape
    return math.inf if shape.rank is None or None in shape else math.prod(shape)
