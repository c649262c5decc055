"""What Keras and TensorFlow get wrong by themselves, one finding a line, as JSON.

python upstream.py multi_worker | mirrored
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf


def say(finding: str, seen: object) -> None:
    print("FOUND", json.dumps({finding: seen}))


def failing_in(call: Callable[[], object]) -> list[str]:
    """The error's type, and the functions it went through."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
        return [type(error).__name__, *(f.name for f in traceback.extract_tb(error.__traceback__))]
    return []


def model(**optimizer: float) -> keras.Model:
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1, **optimizer), "mse")
    return made


def data(samples: int = 4) -> tf.data.Dataset:
    x = np.arange(2 * samples, dtype="float32").reshape(samples, 2)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1] ** 2)).batch(4)


def multi_worker() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        stock, built = model(), model()
        normalization = keras.layers.BatchNormalization()
        normalization.build((None, 2))
    say("fit", failing_in(lambda: stock.fit(data(), verbose=0)))
    # As if the first fault were mended.
    object.__setattr__(built, "_maybe_symbolic_build", lambda **_: None)
    say("logs", failing_in(lambda: built.fit(data(), verbose=0)))
    say("statistics", normalization.moving_mean.value._aggregation.name)
    say("predict", predict_from_files(strategy))


def late() -> None:
    tf.constant(0)
    say("late", failing_in(tf.distribute.MultiWorkerMirroredStrategy))


def predict_from_files(strategy: tf.distribute.Strategy) -> list[float]:
    import keras_distplug as kd

    with strategy.scope():
        double = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
        double.compile()
    kd.adapt(double)
    object.__delattr__(double, "predict")
    folder = Path(tempfile.gettempdir()) / f"files-{os.getpid()}"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"{2 * number}\n{2 * number + 1}\n")
    names = sorted(str(path) for path in folder.iterdir())
    dataset = (
        tf.data.Dataset.from_tensor_slices(names)
        .interleave(tf.data.TextLineDataset, cycle_length=1)
        .map(lambda line: tf.strings.to_number(line)[None])
        .batch(2)
    )
    return double.predict(dataset, verbose=0)[:, 0].tolist()


def mirrored() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def weights(samples: int, distributed: bool, **optimizer: float) -> list[float]:
        scope = strategy.scope() if distributed else tf.distribute.get_strategy().scope()
        with scope:
            made = model(**optimizer)
        made.fit(data(samples), verbose=0)
        return made.layers[-1].kernel.numpy()[:, 0].tolist()

    say("even", [weights(4, False), weights(4, True)])
    say("uneven", [weights(7, False), weights(7, True)])
    say("clipped", [weights(4, False, clipnorm=0.1), weights(4, True, clipnorm=0.1)])


keras.config.disable_traceback_filtering()
{"multi_worker": multi_worker, "late": late, "mirrored": mirrored}[sys.argv[1]]()
