"""A training script that runs unchanged in any environment.

    python examples/train.py                                          # one process
    keras-distplug run --workers 2 -- python examples/train.py        # several on this machine
    sbatch examples/slurm/train.sbatch                                # Slurm
    kubectl create -f examples/kubernetes/tfjob.yaml                  # Kubernetes, with Kubeflow

trains a small network on handwritten digits (scikit-learn's, no download). After it was killed or
preempted, it resumes where it stopped when started again with the same directory, and every
worker's last line shows the same checksum as after an undisturbed training.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import keras
from sklearn.datasets import load_digits

import keras_distplug as kd


def train(directory: str, epochs: int, grace_secs: float, requeue: bool) -> None:
    kd.init()  # joins the other workers, if there are any, before the first tensor
    keras.utils.set_random_seed(7)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
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
        epochs=epochs,
        validation_data=(images[1500:], labels[1500:]),
        callbacks=[kd.PreemptionHandler(grace_secs=grace_secs, requeue=requeue)],
        directory=directory,
    )
    checksum = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        checksum.update(variable.numpy().tobytes())
    accuracy = history.history["val_accuracy"][-1]
    print(f"validation accuracy {accuracy:.4f}, sha256 {checksum.hexdigest()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--directory",
        default=os.path.join("runs", "digits"),
        help="a folder that all workers share, or a URL such as s3://bucket/runs/digits",
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--grace-secs",
        type=float,
        default=30.0,
        help="time from a signal until the machine is gone",
    )
    parser.add_argument(
        "--requeue", action="store_true", help="on Slurm: requeue the job when preempted"
    )
    arguments = parser.parse_args()
    train(arguments.directory, arguments.epochs, arguments.grace_secs, arguments.requeue)
