"""A training is killed three times, mid-epoch. The result is bit for bit the same.

    python examples/exact_resume.py

trains a small network on handwritten digits twice, in a separate process: once undisturbed, and
once with three SIGKILLs after random batches; after each one, the same command is started again.
The training uses dropout, random translations, a shuffled pipeline, EarlyStopping and
ReduceLROnPlateau. Then every bit of weights and optimizer, the History and the states of the
callbacks are compared. No download: the digits are scikit-learn's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

EPOCHS, BATCHES = 6, 24


def train(directory: Path, kills: list[int]) -> None:
    """Trains as a user's script would, except for the kills."""
    import keras
    import numpy as np
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import keras_distplug as kd

    class KillAfter(keras.callbacks.Callback):
        """Kills its own process with `kill -9`, once after every given step."""

        def on_train_batch_end(self, batch, logs=None):
            step = int(self.model.optimizer.iterations.numpy())
            done = directory / f"killed-after-{step}"
            if step in kills and not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    keras.utils.set_random_seed(7)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    data = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
    data = data.shuffle(500, seed=3).batch(1500 // BATCHES, drop_remainder=True)

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.RandomTranslation(0.1, 0.1, seed=1),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    early = keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True)
    history = model.fit(
        data,
        epochs=EPOCHS,
        validation_data=(images[1500:], labels[1500:]),
        shuffle=False,  # `data` is already shuffled
        verbose=0,
        callbacks=[
            *kd.defaults(directory / "runs", save_freq=5),
            early,
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=1),
            KillAfter(),
        ],
    )
    arrays = [*model.weights, *model.optimizer.variables, *map(np.asarray, early.best_weights)]
    np.savez(directory / "outcome.npz", *map(np.asarray, arrays))
    known = {"history": history.history, "epochs": history.epoch, "patience": early.wait}
    (directory / "outcome.json").write_text(json.dumps(known, sort_keys=True))


def demonstrate(folder: Path, seed: int, how_often: int) -> int:
    import numpy as np

    kills = sorted(random.Random(seed).sample(range(1, EPOCHS * BATCHES), how_often))
    for name, after in (("undisturbed", []), ("killed", kills)):
        directory = folder / name
        directory.mkdir(parents=True)
        command = [sys.executable, __file__, "--train", str(directory), *map(str, after)]
        deaths = 0
        while (code := subprocess.run(command, timeout=300).returncode) == -signal.SIGKILL:
            deaths += 1
            print(f"{name}: kill {deaths} of {len(after)}; running the command again", flush=True)
        if code != 0 or deaths != len(after):
            print(f"The {name} training ended with code {code} after {deaths} kills.")
            return 1
    texts = [(folder / name / "outcome.json").read_text() for name in ("undisturbed", "killed")]
    first, second = (np.load(folder / name / "outcome.npz") for name in ("undisturbed", "killed"))
    same = [first[key].tobytes() == second[key].tobytes() for key in first.files]
    known = "the same" if texts[0] == texts[1] else "DIFFERENT"
    print(
        f"Killed after steps {kills} of {EPOCHS * BATCHES}. Bit-identical arrays: "
        f"{sum(same)} of {len(same)}. History and callbacks: {known}"
    )
    return 0 if all(same) and texts[0] == texts[1] else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random choice of kills")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(Path(arguments.train[0]), [int(step) for step in arguments.train[1:]])
    else:
        with tempfile.TemporaryDirectory(prefix="exact-resume-") as scratch:
            sys.exit(demonstrate(Path(scratch), arguments.seed, arguments.kills))
