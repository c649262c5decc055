"""Trains with one worker slower than the others, and reports whom the watchdog names."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import keras_distplug as kd

STRATEGY = kd.init()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support.networks import DEVICE  # noqa: E402

BATCH = 12
EACH_S = 0.02  # minimum duration of a step, to which other work on the machine adds little
SLOW_S = 0.06
LONG_S = 0.25  # makes a window longer than the network measurement's share allows
WINDOW = 5
RANK = STRATEGY.cluster_resolver.task_id


def sleeping(value: Any, seconds: Any, *, stateful: bool = False) -> Any:
    """Returns `value` with a delay. In a pipeline, `stateful` functions process one batch at a
    time."""

    def wait(value: Any, seconds: Any) -> Any:
        time.sleep(float(seconds))
        return value

    later = tf.numpy_function(wait, [value, seconds], value.dtype, stateful=stateful)
    later.set_shape(value.shape)
    return later


class Takes(keras.layers.Layer):
    """A layer whose duration a callback changes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = tf.Variable(EACH_S, trainable=False, dtype=tf.float32)

    def call(self, inputs):
        if tf.executing_eagerly() or isinstance(inputs, keras.KerasTensor):
            return inputs
        return inputs + tf.stop_gradient(sleeping(inputs, self.seconds) - inputs)


class Varies(keras.callbacks.Callback):
    """Makes the steps of this worker slow, or none, or those of a changing worker."""

    def __init__(self, case: str, slow: int, takes: Takes, fine: int) -> None:
        super().__init__()
        self.case, self.slow, self.takes, self.fine = case, slow, takes, fine
        self.step = 0

    def on_train_batch_begin(self, batch, logs=None):
        workers = STRATEGY.num_replicas_in_sync
        wandering = self.case == "wandering" and self.step // (2 * WINDOW) % workers == RANK
        is_slow = wandering or (self.case == "compute" and self.slow == RANK)
        is_long = self.case == "network" and self.step < self.fine * WINDOW
        self.takes.seconds.assign(LONG_S if is_long else SLOW_S if is_slow else EACH_S)
        self.step += 1
        if self.case == "network" and self.slow == RANK and self.step == self.fine * WINDOW:
            rate = f"tc qdisc add dev {DEVICE} root tbf rate 50mbit burst 32kb latency 1s"
            subprocess.run(rate.split(), timeout=30, check=True)


def samples(case: str, slow: int, batches: int) -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batches * BATCH, 6)).astype("float32")
    made = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 2)).batch(BATCH)
    if case != "input":
        return made
    seconds = 2 * SLOW_S if slow == RANK else 0.0
    return made.map(lambda x, y: (sleeping(x, seconds, stateful=True), y))


def trained(
    case: str, slow: int, windows: int, *, fine: int = 0, is_watched: bool = True
) -> dict[str, Any]:
    """Trains `fine` windows before a network becomes slow."""
    found: list[dict[str, Any]] = []
    with STRATEGY.scope():
        keras.utils.set_random_seed(1)
        width = 50_000 if case == "network" else 8  # 1.6 MB of gradients
        takes = Takes()
        made = keras.Sequential(
            [keras.Input((6,)), takes, keras.layers.Dense(width), keras.layers.Dense(1)]
        )
        made.compile(keras.optimizers.Adam(0.01), "mse")
    varies = Varies(case, slow, takes, fine)

    def note(each: Any) -> None:
        found.append(
            {
                "cause": each.cause,
                "worker": each.worker,
                "replica": each.replica,
                "score": each.score,
                "is_over": each.is_over,
                "windows": varies.step // WINDOW,
                "reported": str(each),
            }
        )

    callbacks: list[keras.callbacks.Callback] = [varies]
    if is_watched:
        callbacks.append(kd.StragglerWatchdog(every_steps=WINDOW, on_straggler=note))
    history = kd.adapt(made).fit(
        samples(case, slow, WINDOW * windows), verbose=0, callbacks=callbacks
    )
    weights = b"".join(np.asarray(v.value).tobytes() for v in made.weights)
    return {
        "found": found,
        "history": history.history,
        "bits": hashlib.sha256(weights).hexdigest(),
    }


def main() -> None:
    cases = json.loads(sys.argv[1])
    print(
        "FOUND " + json.dumps({name: trained(**each) for name, each in cases.items()}), flush=True
    )


if __name__ == "__main__":
    main()
    os._exit(0)
