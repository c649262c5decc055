"""Two workers of Ray Train learn to read handwritten digits. One of them may be killed.

    pip install '.[tensorflow-cpu,examples,ray]'
    python examples/ray_train.py
    python examples/ray_train.py --kill              # or --kill SIGTERM

With --kill, one worker is killed mid-epoch. Ray then starts both again, in new processes, which
resume from the last checkpoint: the checksum at the end is the same. Keras 3 alone cannot train in
Ray's TensorflowTrainer (https://github.com/ray-project/ray/issues/47464).
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

EPOCHS = 6
KILL_AT_EPOCH, KILL_AT_BATCH = 2, 9  # counted from 0


def train(config: dict[str, Any]) -> None:
    """Trains on one worker. Ray has set TF_CONFIG, which lists the other workers. It has also set
    `tf.keras` to Keras 2, so import `keras`."""
    import hashlib

    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    import keras_distplug as kd

    directory = Path(config["directory"])

    class KillOnce(keras.callbacks.Callback):
        """Sends a signal to its own process, once."""

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            marker = directory / "killed"
            if (self.epoch, batch) == (KILL_AT_EPOCH, KILL_AT_BATCH) and not marker.exists():
                marker.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.Signals[config["kill"]])

    kd.init()
    rank = ray.train.get_context().get_world_rank()
    keras.utils.set_random_seed(7)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = kd.distributed_fit(
        model,
        images[:1500],
        labels[:1500],
        batch_size=64,
        epochs=EPOCHS,
        validation_data=(images[1500:], labels[1500:]),
        callbacks=[
            # An absolute path or a URL, because Ray's workers have their own working directories.
            *kd.defaults(directory, save_freq=5),
            *[KillOnce()] * (config["kill"] is not None and rank == 1),
        ],
        verbose=2 if rank == 0 else 0,
    )
    state = [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]
    np.savez(directory / f"worker-{rank}.npz", *state, **history.history)
    checksum = hashlib.sha256(b"".join(array.tobytes() for array in state)).hexdigest()
    accuracy = history.history["val_accuracy"][-1]
    print(f"worker {rank}: validation accuracy {accuracy:.4f}, sha256 {checksum}", flush=True)


def main(directory: Path, workers: int, kill: str | None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # On a cluster, use `ray.init()` without arguments, and a URL instead of a folder.
    ray.init(num_cpus=workers, include_dashboard=False)
    try:
        trainer = TensorflowTrainer(
            train,
            train_loop_config={"directory": str(directory), "kill": kill},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                storage_path=str(directory / "ray"),
                # The number of times Ray restarts the workers; by default, it never does.
                failure_config=FailureConfig(max_failures=3),
            ),
        )
        trainer.fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--kill",
        nargs="?",
        const="SIGKILL",
        choices=("SIGKILL", "SIGTERM"),
        help="kill one worker, once, mid-epoch",
    )
    parser.add_argument("--directory", type=Path, help="defaults to a new temporary folder")
    arguments = parser.parse_args()
    home = arguments.directory or Path(tempfile.mkdtemp(prefix="ray-train-"))
    main(home.resolve(), arguments.workers, arguments.kill)
