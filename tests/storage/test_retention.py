"""Rules for which checkpoints to keep."""

from __future__ import annotations

import math
from typing import Any

import pytest

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage.retention import Retention, RetentionEntry


def gone(steps: list[int], losses: list[float] | None = None, **rules: Any) -> list[int]:
    """Returns the steps of the checkpoints that no rule keeps."""
    metrics = [{} if losses is None else {"loss": loss} for loss in losses or [0.0] * len(steps)]
    made = [RetentionEntry(str(step), step, m) for step, m in zip(steps, metrics, strict=True)]
    return [int(name) for name in Retention(**rules).expired(made)]


@pytest.mark.parametrize(
    ("keep_last", "expected"), [(1, [1, 2, 3]), (3, [1]), (4, []), (9, [])], ids=str
)
def test_newest(keep_last: int, expected: list[int]) -> None:
    """All but the newest `keep_last` are deleted."""
    assert gone([1, 2, 3, 4], keep_last=keep_last) == expected


def test_no_checkpoints() -> None:
    assert gone([]) == []


def test_every_steps() -> None:
    """The first checkpoint after every multiple is kept forever, regardless of the steps."""
    steps: list[int] = []
    for step in range(7, 400, 7):
        steps.append(step)
        for old in gone(steps, keep_last=1, keep_every_steps=100):
            steps.remove(old)
    assert steps == [105, 203, 301, 399]


def test_best() -> None:
    """The best checkpoints by a metric are kept, and better ones replace them."""
    steps: list[int] = []
    losses = {1: 0.9, 2: 0.4, 3: 0.8, 4: 0.5, 5: math.nan, 6: 0.7, 7: 0.3, 8: 0.6}
    stood = []
    for step in losses:
        steps.append(step)
        of_steps = [losses[each] for each in steps]
        for old in gone(steps, of_steps, keep_last=1, keep_best=("loss", "min", 2)):
            steps.remove(old)
        stood.append(list(steps))
    assert stood == [[1], [1, 2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 6], [2, 7], [2, 7, 8]]


def test_largest_is_best() -> None:
    rules = {"keep_last": 1, "keep_best": ("loss", "max", 1)}
    assert gone([1, 2, 3, 4], [0.1, 0.9, 0.9, 0.2], **rules) == [1, 2]


def test_missing_metric() -> None:
    """Checkpoints without the metric never count as the best."""
    made = [
        RetentionEntry("a", 1, {"loss": 0.1}),
        RetentionEntry("b", 2),
        RetentionEntry("c", 3, {"loss": math.nan}),
    ]
    rules = Retention(keep_last=1, keep_best=("loss", "min", 2))
    assert rules.expired(made) == ("b",)


@pytest.mark.parametrize(
    "rules",
    [
        *({"keep_last": count} for count in (0, -1, True, 1.5, None)),
        *({"keep_every_steps": count} for count in (0, -1, True, 1.5)),
        *({"keep_best": ("loss", "min", count)} for count in (0, True, 1.5)),
        *({"keep_best": each} for each in (("loss", "auto", 1), ("loss", "min"), (1, "min", 1))),
        {"keep_best": "loss"},
    ],
    ids=str,
)
def test_unusable(rules: Any) -> None:
    """A rule that would keep nothing, or is meaningless, is refused by name."""
    [name] = rules
    with pytest.raises(ConfigurationError, match=f"`{name}`.*Received: "):
        Retention(**rules)
