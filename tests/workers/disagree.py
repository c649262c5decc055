"""Trains repeatedly on two workers, one of which differs, and reports the outcomes.

    python disagree.py FOLDER

Writes FOLDER/<worker>.json: the error, or None, for every kind of difference and every way of use.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd
from keras_distplug.checkpoint import same_start
from keras_distplug.core.errors import ConfigurationError

FOLDER = Path(sys.argv[1])
STRATEGY = kd.init()
RANK = STRATEGY.cluster_resolver.task_id
EVERYWHERE = (
    "rate",
    "loss",
    "optimizer",
    "beta",
    "metrics",
    "values",
    "order",
    "size",
    "batch",
    "epochs",
    "validation",
    "validation_freq",
    "steps_per_epoch",
    "class_weight",
)
OWN_PARTS = ("own part", "own batches", "own validation")
KINDS = {
    # A model with other shapes cannot be created in the scope: its variables belong to all workers.
    "distributed_fit": ("units", "activation", *EVERYWHERE, "seed", "learning_rate", *OWN_PARTS),
    "fit": (*EVERYWHERE, "seed", "learning_rate", *OWN_PARTS),
}

lines: list[str] = []
mock.patch.object(same_start, "announce", lines.append).start()


def train(way: str, what: str) -> tf.distribute.Strategy:
    def differs(name: str, other: Any, usual: Any) -> Any:
        return other if what == name and RANK == 1 else usual

    rng = np.random.default_rng(differs("values", 5, 0))
    x = rng.normal(size=(differs("size", 96, 64), 4)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) > 0).astype("float32")
    if differs("order", True, False):
        x, y = x[::-1], y[::-1]
    keras.utils.set_random_seed(differs("seed", 2, 1))

    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(
                    differs("units", 9, 8), activation=differs("activation", "tanh", "relu")
                ),
                keras.layers.Dropout(differs("rate", 0.3, 0.2)),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        rate, beta = differs("learning_rate", 0.05, 0.01), differs("beta", 0.8, 0.9)
        optimizer = keras.optimizers.Adam(rate, beta_1=beta)
        model.compile(
            differs("optimizer", keras.optimizers.SGD(0.01), optimizer),
            differs("loss", "mse", "binary_crossentropy"),
            metrics=differs("metrics", [], ["accuracy"]),
        )
        return model

    data: dict[str, Any] = {
        "x": x,
        "y": y,
        "batch_size": differs("batch", 8, 16),
        "validation_data": differs("validation", None, (x, y)),
    }
    if what in OWN_PARTS:
        policy = tf.data.Options()
        policy.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        part = tf.data.Dataset.from_tensor_slices((x[RANK::2], y[RANK::2])).batch(8)
        less = part.take(differs("own batches", 2, -1)).with_options(policy)
        validation = part.take(differs("own validation", 3, -1)).with_options(policy)
        data = {"x": less, "validation_data": validation}
    given = {
        **data,
        "epochs": differs("epochs", 3, 2),
        "validation_freq": differs("validation_freq", 2, 1),
        "steps_per_epoch": differs("steps_per_epoch", 2, None),
        "class_weight": differs("class_weight", {0: 1.0, 1: 2.0}, None),
        "verbose": 0,
        "callbacks": kd.defaults(FOLDER / f"{way}-{what}"),
    }
    if way == "distributed_fit":
        return kd.distributed_fit(build(), **given).model
    with STRATEGY.scope():
        model = build()
    model.fit(**given)
    return model


def reported(way: str, what: str) -> dict[str, Any]:
    lines.clear()
    start_s = time.perf_counter()
    try:
        model = train(way, what)
    except ConfigurationError as error:
        return {"error": str(error), "secs": time.perf_counter() - start_s}
    weights = [np.asarray(each).tolist() for each in model.get_weights()]
    return {"error": None, "noted": list(dict.fromkeys(lines)), "weights": weights}


found = {way: {what: reported(way, what) for what in kinds} for way, kinds in KINDS.items()}
(FOLDER / f"worker-{RANK}.json").write_text(json.dumps(found))
