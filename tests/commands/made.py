"""Makes directories with runs for tests of the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from storage.checkpoints import RUN, Checkpoints

from keras_distplug.core.state import Completion, Cursor, TrainState
from keras_distplug.storage import runs
from keras_distplug.storage.files import Files, open_files

BATCHES = 4  # an epoch


def state(step: int, val_loss: float = 0.5, **changes: Any) -> TrainState:
    arrays = {
        "model/dense/kernel": np.arange(12, dtype=np.float32).reshape(3, 4) + step,
        "model/dense/bias": np.full(4, step, ml_dtypes.bfloat16),
        "optimizer/iteration": np.array(step, np.int64),
        "random/global_seed_generator": np.array([7, step], np.uint32),
    }
    given = {
        "history": {"loss": [2.0, 1.0 / step]},
        "history_epochs": (0, 1),
        "metrics": {"loss": 1.0 / step, "val_loss": val_loss},
    }
    return TrainState(
        Cursor(epoch=step // BATCHES, batch=step % BATCHES, step=step), arrays, **given | changes
    )


def final(step: int, **changes: Any) -> TrainState:
    return state(
        step, completion=Completion(epochs=step // BATCHES, stopped_early=False), **changes
    )


def run(directory: str | Path | Files, *states: TrainState, name: str = RUN) -> Checkpoints:
    """Makes a run with one checkpoint per state."""
    files = open_files(directory) if isinstance(directory, str | Path) else directory
    assert runs.create_run(files, job=None, seed=0).name == name
    checkpoints = Checkpoints(files, keep_last=99, run=name)
    for each in states:
        checkpoints.save(each)
    return checkpoints


def cut_off(directory: str | Path, name: str, run: str = RUN) -> None:
    """Makes the remains of a save that was killed after its first file."""
    open_files(directory).create(f"{run}/{name}/aa-1/rank-0-1.safetensors", [b"x" * 100])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def listing(directory: str) -> list[str]:
    """Every path below a directory."""
    files = open_files(directory)

    def below(path: str) -> list[str]:
        names = [f"{path}/{name}".strip("/") for name in files.names(path)]
        return [inner for name in names for inner in (name, *below(name))]

    return below("")


def _shard(checkpoint: Path) -> Path:
    return min(checkpoint.rglob("*.safetensors"))  # a StopIteration would end an epoch


def _flip(checkpoint: Path) -> None:
    shard = _shard(checkpoint)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def _cut(checkpoint: Path) -> None:
    shard = _shard(checkpoint)
    shard.write_bytes(shard.read_bytes()[:-1])


def _grow(checkpoint: Path) -> None:
    shard = _shard(checkpoint)
    shard.write_bytes(shard.read_bytes() + b"x")


def _change_manifest(checkpoint: Path) -> None:
    manifest = checkpoint / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"step": ', '"step": 1'))


def _cut_manifest(checkpoint: Path) -> None:
    manifest = checkpoint / "MANIFEST.json"
    manifest.write_text(manifest.read_text()[:-10])


def _set_aside(checkpoint: Path) -> None:
    (checkpoint / "DAMAGED.json").write_text(json.dumps({"reason": "a bit fell over"}))


# Kinds of damage: the function that causes it, the reason in messages, is it visible by size?
HARM: dict[str, tuple[Callable[[Path], None], str, bool]] = {
    "flipped": (_flip, "has changed since it was written", False),
    "cut": (_cut, "bytes that were committed", True),
    "grown": (_grow, "more bytes", True),
    "missing": (lambda checkpoint: _shard(checkpoint).unlink(), "is missing", True),
    "manifest": (_change_manifest, "was changed after it was written", True),
    "half a manifest": (_cut_manifest, "is not a complete manifest", True),
    "set aside": (_set_aside, "a bit fell over", True),
}
