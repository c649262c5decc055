"""A training in Weights & Biases, MLflow or both, in one run however often it is killed.

    python examples/tracked.py --tracker mlflow     # kill it whenever you like
    python examples/tracked.py --tracker mlflow     # the same run continues
    mlflow ui --backend-store-uri sqlite:///mlflow.db

Without an account, set WANDB_MODE=offline for `--tracker wandb`. `--callbacks` adds the tracker's
own Keras callback: then the script opens the tracker's run, which `RunLog` and the callback share.
"""

from __future__ import annotations

import argparse
import uuid
from pathlib import Path
from typing import Any

import digits
import keras

import keras_distplug as kd


def wandb_run(folder: Path) -> Any:
    """The script's own run, with the same ID after every start."""
    import wandb

    stored = folder / "wandb-run-id"
    if not stored.exists():
        stored.write_text(uuid.uuid4().hex)
    return wandb.init(project="digits", id=stored.read_text(), resume="allow")


def mlflow_run_id(folder: Path) -> str:
    """The script's own run, which is created once and then resumed."""
    import mlflow

    stored = folder / "mlflow-run-id"
    run = mlflow.start_run(run_id=stored.read_text() if stored.exists() else None)
    stored.write_text(run.info.run_id)
    return run.info.run_id


def with_callbacks(names: list[str], folder: Path) -> tuple[list[Any], list[Any]]:
    """Trackers, and the trackers' own callbacks in the same runs."""
    trackers: list[Any] = []
    callbacks: list[Any] = []
    if "wandb" in names:
        trackers.append(kd.WandbTracker(run=wandb_run(folder)))
        from wandb.integration.keras import WandbMetricsLogger

        callbacks.append(WandbMetricsLogger())
    if "mlflow" in names:
        trackers.append(kd.MlflowTracker(run_id=mlflow_run_id(folder)))
        from mlflow.keras import MlflowCallback

        callbacks.append(MlflowCallback())
    return trackers, callbacks


def main(directory: str, epochs: int, names: list[str], has_callbacks: bool) -> None:
    keras.utils.set_random_seed(7)
    (x_train, y_train), (x_test, y_test) = digits.load()
    model = keras.Sequential(
        [
            keras.Input(x_train.shape[1:]),
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
    callbacks: list[Any] = []
    if has_callbacks:
        Path(directory).mkdir(parents=True, exist_ok=True)
        trackers, callbacks = with_callbacks(names, Path(directory))
    else:
        made = {"wandb": kd.WandbTracker, "mlflow": kd.MlflowTracker}
        trackers = [made[name]("digits") for name in names]
    ours = [*kd.defaults(directory, save_freq="epoch"), kd.RunLog(trackers=trackers)]
    history = model.fit(
        x_train,
        y_train,
        batch_size=64,
        epochs=epochs,
        validation_data=(x_test, y_test),
        verbose=2,
        callbacks=[*ours, *callbacks],
    )
    accuracy = history.history["val_accuracy"]
    print(f"validation accuracy {accuracy[-1]:.4f} after {len(accuracy)} epochs", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="runs/tracked", help="a folder")
    parser.add_argument("--epochs", type=int, default=100, help="over all starts together")
    parser.add_argument("--tracker", nargs="+", choices=["wandb", "mlflow"], default=["mlflow"])
    parser.add_argument("--callbacks", action="store_true", help="and the tracker's own callback")
    arguments = parser.parse_args()
    main(arguments.directory, arguments.epochs, arguments.tracker, arguments.callbacks)
