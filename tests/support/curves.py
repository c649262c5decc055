"""Reads TensorBoard's files with TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from tensorboard.util import tensor_util

Curve = list[tuple[int, float]]


def curves_in(folder: Path, only: Sequence[str] = ()) -> dict[str, dict[str, Curve]]:
    """Returns steps and values by tag, for all or some runs."""
    found = {}
    names = only or sorted(each.name for each in folder.iterdir() if each.is_dir())
    for run in (folder / name for name in names):
        events = EventAccumulator(str(run), size_guidance={"tensors": 0})
        events.Reload()
        tags = [tag for tag in events.Tags()["tensors"] if tag != CONFIG_SUMMARY_TAG]
        found[run.name] = {tag: _curve(events, tag) for tag in tags}
    return found


def _curve(events: EventAccumulator, tag: str) -> Curve:
    """Ignores histograms and graphs."""
    values = [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
    return [(step, value.item()) for step, value in values if value.size == 1]


def texts_in(folder: Path, tag: str) -> list[tuple[int, str]]:
    """Returns steps and texts of a run."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    found = [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
    return [(step, value.item().decode()) for step, value in found]
