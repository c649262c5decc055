"""The loss of a run over time, in a size that does not grow with the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from keras_distplug.core.events import EpochEnded, Window
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.replicas_shown import BINS


def points(chiefs: Sequence[Fit], begin: float, end: float) -> list[dict[str, Any]]:
    """Returns the curves of all attempts: `at`, in seconds since 1970, `step` and `loss`, and the
    same with the validation loss of epochs, if there is one.

    Args:
        chiefs: The fits of the chief, oldest first.
        begin: The start of the run, in seconds since 1970.
        end: When it finished, in seconds since 1970.
    """
    width = (end - begin) / BINS or 1.0
    return [
        {
            "attempt": number,
            "loss": _thinned(list(_losses(fit)), begin, width),
            "val_loss": _thinned(list(_validation_losses(fit)), begin, width),
        }
        for number, fit in enumerate(chiefs)
    ][-BINS:]


def _losses(fit: Fit) -> Iterator[tuple[float, int, float]]:
    for entry in fit.entries:
        event = entry.event
        if isinstance(event, Window) and event.loss is not None:
            yield entry.at, event.step, event.loss
        elif isinstance(event, EpochEnded) and event.logs.get("loss") is not None:
            yield entry.at, event.step, float(event.logs["loss"] or 0.0)


def _validation_losses(fit: Fit) -> Iterator[tuple[float, int, float]]:
    for entry in fit.entries:
        if isinstance(entry.event, EpochEnded):
            loss = entry.event.logs.get("val_loss")
            if loss is not None:
                yield entry.at, entry.event.step, loss


def _thinned(
    found: Sequence[tuple[float, int, float]], begin: float, width: float
) -> list[tuple[float, int, float]]:
    """Keeps the first, smallest, largest and last point of every stretch of time."""
    bins: dict[int, list[tuple[float, int, float]]] = {}
    for point in found:
        bins.setdefault(int((point[0] - begin) / width), []).append(point)
    kept: list[tuple[float, int, float]] = []
    for each in bins.values():
        chosen = {
            each[0],
            min(each, key=lambda point: point[2]),
            max(each, key=lambda point: point[2]),
            each[-1],
        }
        kept += sorted(chosen)
    return [(round(at, 2), step, float(f"{loss:.4g}")) for at, step, loss in kept]
