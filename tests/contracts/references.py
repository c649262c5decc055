"""Expected outcomes if one process computes something else. They are run with plain Keras."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from contracts import cases, uses
from contracts.row import Row
from support.lazily import Lazily

keras: Any = Lazily("keras")
tf: Any = Lazily("tensorflow")


def of_known_length(row: Row, replicas: int) -> uses.Outcome:
    """Uses data of known length: plain Keras otherwise runs an additional step per epoch."""
    return uses.fit(cases.batches)(row.build())


def different_everywhere(row: Row, replicas: int) -> uses.Outcome:
    """Every replica draws different numbers, the same ones from the same state, and then others."""
    model = row.build()
    return {
        layer.name: np.array([replicas, True, False])
        for layer in (*model.on_sequences, *model.on_images)
    }


def replica_by_replica(row: Row, replicas: int) -> uses.Outcome:
    """Computes one step by hand, with statistics of every replica's own part of the batch.

    Gradients and moving statistics are means over the samples of the global batch.
    """
    model = row.build()
    bounds = [cases.GLOBAL_BATCH * n // replicas for n in range(replicas + 1)]
    parts = [np.arange(*each) for each in pairwise(bounds)]
    statistics = [v for v in model.non_trainable_variables if v.dtype == "float32"]
    before = [v.numpy() for v in statistics]
    gradients: list[Any] = [0.0] * len(model.trainable_variables)
    after: list[Any] = [0.0] * len(statistics)
    for part in parts:
        share = len(part) / cases.GLOBAL_BATCH
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(value)
        with tf.GradientTape() as tape:
            predicted = model(cases.IMAGES[part], training=True)
            loss = share * tf.reduce_mean((predicted - cases.Y[part]) ** 2)
        for n, gradient in enumerate(tape.gradient(loss, model.trainable_variables)):
            gradients[n] += gradient.numpy()
        for n, variable in enumerate(statistics):
            after[n] += share * variable.numpy()
    for variable, value in zip(statistics, after, strict=True):
        variable.assign(value)
    model.optimizer.apply([tf.constant(g) for g in gradients], model.trainable_variables)
    return uses.outcome(model)
