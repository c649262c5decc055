"""The epochs whose checkpoints `keep_best` keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras

from keras_distplug.core.log import announce
from keras_distplug.python_state import json_values
from keras_distplug.storage.retention import Retention


def is_among_best(
    retention: Retention,
    epoch: int,
    logs: Mapping[str, Any] | None,
    history: keras.callbacks.History,
) -> bool:
    """Returns True if `retention.keep_best` keeps a checkpoint of the end of this epoch."""
    if retention.keep_best is None:
        return False
    metric, mode, count = retention.keep_best
    value = json_values.numbers(logs or {}).get(metric, math.nan)
    if math.isnan(value):
        return False
    recorded = history.history.get(metric, [])
    if history.epoch and history.epoch[-1] == epoch:
        recorded = recorded[:-1]
    earlier = json_values.numbers({str(number): each for number, each in enumerate(recorded)})
    sign = -1 if mode == "min" else 1
    return sum(sign * each > sign * value for each in earlier.values()) < count


def announce_unknown(retention: Retention, logs: Mapping[str, Any] | None) -> None:
    """Names the metrics there are, if that of `retention.keep_best` is not among them."""
    if retention.keep_best is None or (metric := retention.keep_best[0]) in (logs or {}):
        return
    announce(
        f"`keep_best` names {metric!r}, which the logs of the first epoch lack (they have "
        f"{', '.join(logs or {})}): only checkpoints whose logs have it can be the best"
    )
