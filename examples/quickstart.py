"""Two workers learn to read handwritten digits. One is killed; the result is bit for bit the same.

    python examples/quickstart.py

trains a small convolutional network twice with `keras-distplug run --workers 2`: once undisturbed,
and once with a real SIGKILL during training. Then it compares every bit of weights and optimizer
state on every worker. Real data (scikit-learn's 1,797 bundled digits), no download.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

EPOCHS = 5
KILL_AT_EPOCH, KILL_AT_BATCH = 2, 9  # counted from 0


def train(directory: Path, kill: bool) -> None:
    """Trains as a user's script would. Every worker runs it."""
    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    import keras_distplug as kd

    strategy = kd.init()  # at the top of a script that may run on several workers
    worker = strategy.cluster_resolver.task_id
    keras.utils.set_random_seed(7)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9, synchronized=True),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    callbacks = [KillOnce(directory / "killed-at")] if kill and worker == 1 else []
    history = kd.distributed_fit(
        model,
        images[:1500],
        labels[:1500],
        batch_size=64,
        epochs=EPOCHS,
        validation_data=(images[1500:], labels[1500:]),
        callbacks=callbacks,
        directory=directory,
    )

    state = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    np.savez(directory / f"worker-{worker}.npz", *state, accuracy=history.history["val_accuracy"])


def KillOnce(marker: Path):
    """Returns a callback that kills its own process with `kill -9`, once."""
    import keras

    class _KillOnce(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == (KILL_AT_EPOCH, KILL_AT_BATCH) and not marker.exists():
                marker.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    return _KillOnce()


def demonstrate(folder: Path, workers: int) -> int:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    console = Console()
    start_s = time.time()
    for name, kill in (("undisturbed", False), ("killed", True)):
        console.rule(f"[bold]{workers} workers, {name}")
        directory = folder / name
        directory.mkdir(parents=True)
        script = [sys.executable, __file__, "--train", str(directory), *["--kill"] * kill]
        command = ["-m", "keras_distplug", "run", "--workers", str(workers), "--", *script]
        # oneDNN prints a notice several times in every process.
        quiet = os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"}
        code = subprocess.run([sys.executable, *command], env=quiet, timeout=300).returncode
        if code != 0:
            console.print(f"[red]The {name} run failed with exit code {code}.")
            return code

    console.rule("[bold]the comparison")
    if not (folder / "killed" / "killed-at").exists():
        console.print("[red]The kill never happened.")
        return 1
    states = {
        (name, worker): np.load(folder / name / f"worker-{worker}.npz")
        for name in ("undisturbed", "killed")
        for worker in range(workers)
    }
    reference = states["undisturbed", 0]
    table = Table("run", "worker", "validation accuracy", "arrays", "bytes", "bit for bit equal")
    same = []
    for (name, worker), state in states.items():
        arrays = [state[key] for key in state.files]
        same.append(
            all(state[key].tobytes() == reference[key].tobytes() for key in reference.files)
            and state.files == reference.files
        )
        table.add_row(
            name,
            str(worker),
            f"{state['accuracy'][-1]:.4f}",
            str(len(arrays)),
            f"{sum(array.nbytes for array in arrays):,}",
            "[green]yes" if same[-1] else "[red]NO",
        )
    console.print(table)
    if not all(same):
        console.print("[red]The killed run differs from the undisturbed one.")
        return 1
    console.print(
        f"[green]Worker 1 was killed in epoch {KILL_AT_EPOCH + 1}, and the result is the same, bit "
        f"for bit.[/] {time.time() - start_s:.0f} s in total. The runs are in {folder}."
    )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--train", type=Path, metavar="DIRECTORY", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workers < 2:
        parser.error(f"--workers must be >= 2, since one of them is killed: {arguments.workers}")
    if arguments.train:
        train(arguments.train, arguments.kill)
    else:
        home = Path("keras_distplug_runs") / f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}"
        sys.exit(demonstrate(home, arguments.workers))
