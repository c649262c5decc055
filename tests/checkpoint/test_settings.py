"""Tests the settings of `BackupAndRestore`, and the equivalent single arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from keras_distplug.checkpoint.settings import (
    RESUMING,
    RETENTION,
    SAVING,
    LocalCheckpoints,
    Resuming,
    ResumingFields,
    Saving,
    Settings,
    Single,
)
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage.retention import Retention

BEST = ("val_loss", "min", 3)
DEFAULTS = (SAVING, RETENTION, RESUMING, None)


def test_single_arguments(tmp_path: Path) -> None:
    """Every field is also accepted as an argument, with the same meaning."""
    saving = Saving("wait", 0.05, 5)
    retention = Retention(4, 100, BEST)
    local = LocalCheckpoints(tmp_path, "30s")
    assert local == LocalCheckpoints(str(tmp_path), "30s")
    resuming = Resuming(True, True, True, False, "runs/other", True)
    values = vars(saving) | vars(retention) | vars(resuming) | vars(local)
    assert values.keys() == get_type_hints(Single).keys()
    assert get_type_hints(ResumingFields).keys() == Resuming.names()
    given = Settings.of(saving, retention, resuming, local, {})
    assert Settings.of(SAVING, RETENTION, RESUMING, None, values) == given
    unset = Settings.of(SAVING, RETENTION, RESUMING, None, {})
    assert unset == Settings(Saving(), Retention(), Resuming(), None)


def test_local_tier_alone(tmp_path: Path) -> None:
    """`None`, the former default, means that it was not given."""
    given = {"local_tier": tmp_path, "local_freq": None}
    assert Settings.of(*DEFAULTS, given).local == LocalCheckpoints(tmp_path, "auto")
    none = {"local_tier": None, "local_freq": None}
    assert Settings.of(*DEFAULTS, none).local is None


@pytest.mark.parametrize(
    ("values", "single", "message"),
    [
        (
            {"saving": Saving("skip", 0.05)},
            {"on_busy": "wait"},
            "Expected `on_busy` inside `saving`, because `saving` is given. Received: "
            "saving=Saving(max_overhead=0.05) and on_busy='wait'",
        ),
        (
            {"retention": Retention(3)},
            {"keep_last": 3, "keep_best": BEST},
            "Expected `keep_last`, `keep_best` inside `retention`",
        ),
        (
            {"local": LocalCheckpoints("/dev/shm/a")},
            {"local_freq": "30s"},
            "Expected `local_freq` inside `local`",
        ),
        (
            {"retention": 3},
            {},
            "Expected `retention` to be a `keras_distplug.Retention`. Received: 3",
        ),
        (
            {"saving": "wait"},
            {},
            "Expected `saving` to be a `keras_distplug.Saving`. Received: 'wait'",
        ),
        (
            {"local": "/dev/shm/a"},
            {},
            "Expected `local` to be a `keras_distplug.LocalCheckpoints`. Received: '/dev/shm/a'",
        ),
        (
            {},
            {"init_optimizer": True},
            "the optimizer of the run in `init_from`, which is not given",
        ),
        ({}, {"local_freq": "30s"}, "folder `local_tier`, which is not given"),
    ],
)
def test_refused(values: dict[str, Any], single: dict[str, Any], message: str) -> None:
    given = {"saving": SAVING, "retention": RETENTION, "resuming": RESUMING, "local": None}
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Settings.of(**{**given, **values}, single=single)


@pytest.mark.parametrize("max_overhead", [0.0, 1.0, -0.1, "1%", None, 1])
def test_unusable_overhead(max_overhead: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"`max_overhead`.*Received: "):
        Saving(max_overhead=max_overhead)


def test_unknown() -> None:
    """The error is the same as Python's."""
    message = "BackupAndRestore.__init__() got an unexpected keyword argument 'keep_lst'"
    with pytest.raises(TypeError, match=re.escape(message)):
        Settings.of(*DEFAULTS, {"keep_lst": 3})
