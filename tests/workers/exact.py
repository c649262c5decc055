"""Trains, and is killed at random times.

    python exact.py FOLDER SETUP SEED [CONTROL]

SETUP: single, mirrored, or multi_worker. SEED: an odd or even one selects the training. CONTROL:
the state that is not restored, so that the comparison must fail: `seeds`, `metrics`, or `replicas`
for those of all replicas except the first. FOLDER/faults.json lists the kills.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

folder, setup, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
control = sys.argv[4] if len(sys.argv) > 4 else None

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402

several = "TF_CONFIG" in os.environ
if setup == "mirrored":
    cpu = tf.config.list_physical_devices("CPU")[0]
    each = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [each, each])
strategy = kd.init("multi_worker" if several else "one_device" if setup == "single" else setup)

from support.harm import Harm  # noqa: E402
from support.kills import BATCHES, EPOCHS, VALIDATION_BATCHES  # noqa: E402
from support.where import own_name  # noqa: E402

from keras_distplug.checkpoint import own_states  # noqa: E402


def control_experiment() -> None:
    """Skips the restore of a state, which the comparison must notice."""
    if control == "metrics":
        own_states.restore_existing = lambda *args, **kwargs: None
    elif control == "replicas":
        stock = own_states.restore_existing

        def of_the_first(model, arrays, *args, **kwargs):
            first = {k: v for k, v in arrays.items() if k.startswith(f"{own_states.PREFIX}0000")}
            return stock(model, first, *args, **kwargs)

        own_states.restore_existing = of_the_first
    elif control == "seeds":
        from keras_distplug.checkpoint import capture

        stock_capture = capture.capture

        def without_seeds(model):
            taken = stock_capture(model)
            return {
                key: tf.zeros_like(value) if "seed" in key else value
                for key, value in taken.items()
            }

        capture.capture = without_seeds


def build() -> keras.Model:
    keras.utils.set_random_seed(21)
    made = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.RandomTranslation(0.1, 0.1, seed=5),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3, seed=6),
            keras.layers.Dense(5),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.02, EPOCHS * BATCHES)
    made.compile(
        keras.optimizers.Adam(rate if seed % 2 else 0.02),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    return made


def data(samples: int) -> tf.data.Dataset:
    draw = np.random.default_rng(8)
    x = draw.normal(size=(samples, 8, 8, 1)).astype("float32")
    y = draw.integers(0, 5, samples)
    w = draw.random(samples).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y, w)).shuffle(samples, seed=9).batch(8)


control_experiment()
callbacks = [
    # The labels are noise: the best epoch by `val_loss` is an early one, by `loss` the last.
    keras.callbacks.EarlyStopping(
        "loss" if seed % 2 else "val_loss", patience=EPOCHS - 1, restore_best_weights=True
    ),
    *([] if seed % 2 else [keras.callbacks.ReduceLROnPlateau("loss", patience=1)]),
    keras.callbacks.CSVLogger(folder / "log.csv"),
    Harm(folder, BATCHES, 1, folder / "runs"),
    kd.BackupAndRestore(folder / "runs", save_freq=2, delete_checkpoint=False, on_busy="wait"),
]
history = kd.distributed_fit(
    build,
    data(8 * BATCHES - 3),
    epochs=EPOCHS,
    validation_data=data(8 * VALIDATION_BATCHES),
    callbacks=callbacks,
    verbose=0,
    strategy=strategy,
)
model = history.model
early = callbacks[0]
state = {f"variable/{i:03}": v.numpy() for i, v in enumerate(model.weights)}
state |= {f"optimizer/{i:03}": v.numpy() for i, v in enumerate(model.optimizer.variables)}
state |= {f"history/{name}": np.array(values) for name, values in history.history.items()}
state |= {
    f"early/{name}": np.array(getattr(early, name)) for name in ("wait", "best", "best_epoch")
}
state |= {f"best/{i:03}": np.asarray(w) for i, w in enumerate(early.best_weights or ())}
state["csv"] = np.array((folder / "log.csv").read_text())
state["epochs"] = np.array(history.epoch)
np.savez(folder / f"outcome-{own_name()}.npz", **state)
