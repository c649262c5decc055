"""Half precision: which skipped updates are faults, and which are not.

    python examples/mixed_precision.py                              # float16, with loss scaling
    python examples/mixed_precision.py --policy mixed_bfloat16      # needs no loss scaling
    python examples/mixed_precision.py --policy float32             # for comparison

trains a small network on handwritten digits, one of which is damaged: it contains a NaN.

float16 has no numbers above 65,504, and rounds numbers below 6e-8 to 0. So Keras multiplies the
loss by a scale, and when a gradient overflows, it skips the update and halves the scale: this is
how it finds the right scale, not a fault. `NaNWatchdog`, which is among `kd.defaults()`, does not
report it. The batch with the damaged picture is a fault, which is reported in every epoch. The
batch is saved: `keras-distplug replay runs/mixed_precision/mixed_float16` recomputes it.

On a CPU, half precision is slower: on two cores, a step took 6.9 ms in float32, 8.4 in float16 and
11.2 in bfloat16. The speedup on a GPU is **not verified** here.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time

import digits
import keras
import numpy as np

import keras_distplug as kd

EPOCHS, BATCH = 6, 64
SAMPLES = 3000  # of MNIST, if installed; the other data set is smaller
DAMAGED = 100  # the number of a picture


def build(shape: tuple[int, ...]) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            # The input of the loss must be precise.
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.005)
    if keras.config.dtype_policy().name == "mixed_float16":
        # `compile` would do this, too, with an initial scale of 2 ** 15. This one is too large, to
        # show what happens then.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**24)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(policy: str, directory: str) -> None:
    keras.config.set_dtype_policy(policy)
    train, test = (tuple(array[:SAMPLES] for array in part) for part in digits.load())
    x_train, y_train = train
    x_train[DAMAGED] = np.nan
    model = build(x_train.shape[1:])

    faults: list[str] = []
    times_s: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: times_s.append(time.perf_counter())
    )
    history = model.fit(
        x_train,
        y_train,
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_data=test,
        verbose=2,
        callbacks=[
            *kd.defaults(f"{directory}/{policy}"),
            # Your own instance replaces the one from `defaults()`.
            kd.NaNWatchdog(on_fault=lambda fault: faults.append(str(fault))),
            clock,
        ],
    )

    # A checkpoint contains the weights, which are in float32, and the scale.
    optimizer = model.optimizer
    dtypes = ", ".join({weight.dtype for weight in model.weights})
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    updates = int((optimizer.inner_optimizer if is_scaled else optimizer).iterations)
    batches = EPOCHS * math.ceil(len(x_train) / BATCH)
    print(f"{policy}: layers compute in {model.layers[0].compute_dtype}, weights are {dtypes}")
    if is_scaled:
        print(f"scale 2 ** {math.log2(float(optimizer.dynamic_scale)):.0f}")
    print(f"{batches} batches, {updates} updates, {len(faults)} faults reported in this process")
    if len(times_s) > 1:  # false if the run was already finished
        fastest_s = min(later - earlier for earlier, later in itertools.pairwise(times_s))
        print(f"{1000 * fastest_s * BATCH / len(x_train):.1f} ms per step, including validation")
    print(f"validation accuracy {history.history['val_accuracy'][-1]:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    policies = ("mixed_float16", "mixed_bfloat16", "float32")
    parser.add_argument("--policy", choices=policies, default=policies[0])
    parser.add_argument("--directory", default="runs/mixed_precision", help="a folder, or a URL")
    arguments = parser.parse_args()
    main(arguments.policy, arguments.directory)
