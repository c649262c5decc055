"""Trains with `ReplicaMetrics`, and reports the outcome."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras_distplug as kd

STRATEGY = kd.init()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_distplug.backend.tensorflow.replicas import replica_values  # noqa: E402

BATCH, BATCHES, EPOCHS = 12, 6, 2
RANK = STRATEGY.cluster_resolver.task_id
WORKERS = STRATEGY.num_replicas_in_sync


class Drifts(keras.callbacks.Callback):
    """Changes a bias on the last worker, in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and RANK == WORKERS - 1:
            bias = self.model.trainable_variables[1]
            [value] = (np.array(each) for each in replica_values.parts(bias))
            value[0] = np.nextafter(value[0], np.float32(9))
            replica_values.set_parts(bias, [value])


def samples(*, same: bool) -> tf.data.Dataset:
    """Returns global batches, from which every worker takes its part, or, wrongly, the same
    part."""
    x = np.random.default_rng(0).normal(size=(BATCH * BATCHES, 4)).astype("float32")
    made = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 2)).batch(BATCH)
    if not same:
        return made
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return made.with_options(options)


def trained(
    folder: Path | None, *, drifts: bool = False, same: bool = False, is_watched: bool = True
) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    with STRATEGY.scope():
        keras.utils.set_random_seed(1)
        hidden = keras.layers.Dense(5, activation="tanh")
        made = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
        made.compile(keras.optimizers.Adam(0.01), "mse")
    callbacks: list[keras.callbacks.Callback] = [Drifts()] if drifts else []
    if is_watched:
        metrics = kd.ReplicaMetrics(
            folder,
            2,
            logs=["loss_min", "loss_max", "gradient_norm_spread", "step_ms_max"],
            check_every_steps=2,
            fingerprints=True,
            on_divergence=lambda each: found.append(asdict(each)),
        )
        callbacks.append(metrics)
    history = kd.adapt(made).fit(samples(same=same), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    weights = b"".join(np.asarray(v.value).tobytes() for v in made.weights)
    return {
        "history": history.history,
        "bits": hashlib.sha256(weights).hexdigest(),
        "found": found,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    found = {
        "bare": trained(None, is_watched=False),
        "watched": trained(folder / "watched"),
        "drifts": trained(folder / "drifts", drifts=True),
        "same data": trained(None, same=True),
    }
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
