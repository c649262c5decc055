"""The progress of a training job, its speed and the time left."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keras_distplug.core.events import Beat, EpochEnded, Finished, Restored, Window
from keras_distplug.runlog.goodput_totals import Fit

_RECENT_S = 20.0  # a speed is that of about as long
_LEAST_PAST = 5  # windows, to compare with
_IN_STEPS = ("step", "input", "sync")  # of a window's time
_TRAINING = (*_IN_STEPS, "other")


@dataclass(frozen=True)
class Progress:
    """The progress of a run, at the chief's last message.

    Args:
        step: Batches trained since the run started.
        steps: Batches of the whole training; None if that is not known.
        epoch: The current epoch, counted from 1.
        epochs: Epochs that `fit` was called with.
        speed: Steps per second in the last windows, without checkpoints and validation.
        past_speed: The median over the windows before; None if there are too few.
        relative_speed: 1 for as fast as before; None if that is not known.
        left_secs: Estimated seconds until the end of the training.
        loss: The last training loss that is known.
        logs: Logs of the last epoch that has ended.
    """

    step: int
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    speed: float | None = None
    past_speed: float | None = None
    relative_speed: float | None = None
    left_secs: float | None = None
    loss: float | None = None
    logs: tuple[tuple[str, float], ...] = ()


def progress(chiefs: Sequence[Fit]) -> Progress:
    """Returns the progress of a run.

    Args:
        chiefs: The fits of the chief, oldest first.
    """
    if not chiefs:
        return Progress(0)
    last = chiefs[-1]
    step = get_step(last)
    steps = _all_steps(chiefs)
    windows = [window for fit in chiefs for window in _windows(fit)]
    speed, past_speed = _speeds(windows, _TRAINING)
    per_step_s = _wall_secs_per_step(last)
    left = None if steps is None else max(0, steps - step)
    ended = [e.event for e in last.entries if isinstance(e.event, EpochEnded)]
    logs = ended[-1].logs if ended else {}
    losses = [window.loss for window in windows if window.loss is not None]
    return Progress(
        step=step,
        steps=steps,
        epoch=_epoch(last),
        epochs=last.began.epochs,
        speed=speed,
        past_speed=past_speed,
        relative_speed=_relative(windows),
        left_secs=None if left is None or per_step_s is None else left * per_step_s,
        loss=losses[-1] if losses else logs.get("loss"),
        logs=tuple((name, value) for name, value in logs.items() if value is not None),
    )


def get_step(fit: Fit) -> int:
    """Returns the last step that a worker has reported."""
    for entry in reversed(fit.entries):
        event = entry.event
        if isinstance(event, Window | Finished | EpochEnded):
            return event.step
        if isinstance(event, Beat) and event.step is not None:
            return event.step
    return fit.began.step


def usual_step_secs(fit: Fit) -> float | None:
    """Returns the longest time per step of a fit's windows, without the first step; None if there
    is none."""
    each = [_sum_secs(window, _TRAINING) / window.steps for window in _windows(fit)]
    return max(each, default=None)


def _windows(fit: Fit) -> Iterator[Window]:
    """The windows in which the worker has trained, without its start."""
    for entry in fit.entries:
        window = entry.event
        if isinstance(window, Window) and window.steps > 0 and "start_up" not in window.secs:
            yield window


def _sum_secs(window: Window, categories: Sequence[str]) -> float:
    return sum(window.secs.get(category, 0.0) for category in categories)


def _speeds(
    windows: Sequence[Window], categories: Sequence[str]
) -> tuple[float | None, float | None]:
    """Steps per second of the last windows, and the median of those before."""
    recent_s, recent_steps, count = 0.0, 0, 0
    for window in reversed(windows):
        if recent_s >= _RECENT_S or (count >= 3 and len(windows) - count <= _LEAST_PAST):
            break
        recent_s, recent_steps = (
            recent_s + _sum_secs(window, categories),
            recent_steps + window.steps,
        )
        count += 1
    if not recent_s:
        return None, None
    before = [
        window.steps / secs
        for window in windows[: len(windows) - count]
        if (secs := _sum_secs(window, categories)) > 0
    ]
    past = statistics.median(before) if len(before) >= _LEAST_PAST else None
    return recent_steps / recent_s, past


def _relative(windows: Sequence[Window]) -> float | None:
    """The speed compared with its past. Slow callbacks alone, as at the end of an epoch, do not
    count as slow training, and neither do slow steps that callbacks hide."""
    found = []
    for categories in (_IN_STEPS, _TRAINING):
        speed, past = _speeds(windows, categories)
        if speed is None or not past:
            return None
        found.append(speed / past)
    return max(found)


def _wall_secs_per_step(fit: Fit) -> float | None:
    """Over the whole `fit`, with checkpoints and validation, without its start."""
    entries = [entry for entry in fit.entries if isinstance(entry.event, Window)]
    trained = [entry for entry in entries if isinstance(entry.event, Window) and entry.event.steps]
    if len(trained) < 2:
        return None
    first, last = trained[0], trained[-1]
    assert isinstance(first.event, Window)
    assert isinstance(last.event, Window)
    steps = last.event.step - first.event.step
    return (last.at - first.at) / steps if steps > 0 else None


def _epoch(fit: Fit) -> int | None:
    for entry in reversed(fit.entries):
        if isinstance(entry.event, Window | EpochEnded | Restored):
            return min(entry.event.epoch + 1, max(fit.began.epochs, 1))
    return None


def _steps_per_epoch(chiefs: Sequence[Fit]) -> int | None:
    """Returns the steps of an epoch as Keras has reported them, or as a whole epoch had."""
    if (known := chiefs[-1].began.steps_per_epoch) is not None:
        return known
    for fit in reversed(chiefs):
        ends = [each.event for each in fit.entries if isinstance(each.event, EpochEnded)]
        for one, following in zip(ends[-2::-1], ends[:0:-1], strict=False):
            if following.epoch == one.epoch + 1:
                return following.step - one.step
        if ends and fit.began.step == 0 and ends[0].epoch == 0:
            return ends[0].step
    return None


def _all_steps(chiefs: Sequence[Fit]) -> int | None:
    """The step with which the last `fit` will end, unless a callback stops it before."""
    fit = chiefs[-1]
    for entry in reversed(fit.entries):
        if isinstance(entry.event, Finished):
            return entry.event.step
    if (per_epoch := _steps_per_epoch(chiefs)) is None:
        return None
    step, epoch = fit.began.step, 0.0
    is_known = step == 0
    for entry in fit.entries:
        event = entry.event
        if isinstance(event, Restored):
            step, epoch, is_known = event.step - event.batch, event.epoch, True
        elif isinstance(event, EpochEnded):
            step, epoch, is_known = event.step, event.epoch + 1, True
    return step + round((fit.began.epochs - epoch) * per_epoch) if is_known else None
