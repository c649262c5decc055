"""TensorBoard's files, read back by TensorBoard."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

Curve = list[tuple[int, float]]


def curves_in(folder: Path) -> dict[str, dict[str, Curve]]:
    """For each run, by tag, steps and values."""
    found = {}
    for run in sorted(each for each in folder.iterdir() if each.is_dir()):
        events = EventAccumulator(str(run), size_guidance={"tensors": 0})
        events.Reload()
        found[run.name] = {
            tag: [
                (e.step, tensor_util.make_ndarray(e.tensor_proto).item())
                for e in events.Tensors(tag)
            ]
            for tag in events.Tags()["tensors"]
        }
    return found
