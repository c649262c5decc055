"""Rules for which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.values import ShortRepr

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class RetentionEntry:
    """The properties of a committed checkpoint that retention depends on.

    Args:
        name: Its name.
        step: The step at which it was saved.
        metrics: The logs at that point.
    """

    name: str
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Retention(ShortRepr):
    """Rules for which checkpoints to keep: every checkpoint that at least one of them keeps.

    Example:

    ```python
    kd.BackupAndRestore("runs/mnist", retention=kd.Retention(keep_best=("val_loss", "min", 3)))
    ```

    Args:
        keep_last: The number of newest checkpoints to keep, at least 1. Defaults to 2.
        keep_every_steps: An interval in steps: the first checkpoint after every multiple of it is
            kept forever. Defaults to `None`.
        keep_best: A metric of the logs, `"min"` or `"max"`, and the number of best checkpoints to
            keep by it, such as `("val_loss", "min", 3)`. The end of an epoch that is among the best
            is saved whatever `save_freq` is. Among equals, the newer counts as better; a checkpoint
            whose metric is missing or NaN is never kept by this rule. Defaults to `None`.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    keep_last: int = 2
    keep_every_steps: int | None = None
    keep_best: tuple[str, Mode, int] | None = None

    def __post_init__(self) -> None:
        require_count("keep_last", self.keep_last)
        if self.keep_every_steps is not None:
            require_count("keep_every_steps", self.keep_every_steps)
        if self.keep_best is None:
            return
        match self.keep_best:
            case (str(), "min" | "max", int(count)) if count >= 1 and count is not True:
                return
        raise ConfigurationError(
            'Expected `keep_best` to be three values: a metric, "min" or "max", and an integer '
            '>= 1, such as ("val_loss", "min", 3) in a script or `--keep-best val_loss min 3` on '
            f"the command line. Received: {self.keep_best!r}"
        )

    def expired(self, oldest_first: Sequence[RetentionEntry]) -> tuple[str, ...]:
        """Returns the names of the checkpoints that no rule keeps."""
        stay = {each.name for each in oldest_first[-self.keep_last :]}
        if self.keep_every_steps is not None:
            # The list is reversed, so that the first checkpoint of an interval overwrites others.
            stretches = {each.step // self.keep_every_steps: each for each in oldest_first[::-1]}
            stay |= {each.name for stretch, each in stretches.items() if stretch}
        if self.keep_best is not None:
            metric, mode, count = self.keep_best
            stay |= set(rated(oldest_first, metric, mode)[-count:])
        return tuple(each.name for each in oldest_first if each.name not in stay)


def rated(oldest_first: Sequence[RetentionEntry], metric: str, mode: Mode) -> list[str]:
    """Returns the names of the checkpoints that have `metric`, from worst to best by it. The
    newer of equal ones is better."""
    sign = -1 if mode == "min" else 1
    found = [
        (sign * value, place, each.name)
        for place, each in enumerate(oldest_first)
        if not math.isnan(value := each.metrics.get(metric, math.nan))
    ]
    return [name for *_, name in sorted(found)]


def require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"Expected `{name}` to be an integer >= 1. Received: {value!r}")
