"""Stages of tests: with every `pytest`, also in CI, every night, or by hand for hours."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

STAGES = ("default", "ci", "nightly", "soak")
ALL_STAGES = pytest.StashKey[dict[str, str]]()  # of all collected tests

_FILE = tomllib.loads((Path(__file__).parents[1] / "promises.toml").read_text())
PROMISES = _FILE["promise"]
QUICK, NIGHTLY = frozenset(_FILE["quick"]), frozenset(_FILE["nightly"])
_BY_DEFAULT = QUICK.union(*(promise["default"] for promise in PROMISES))
_SLOW = ("tf", "cluster", "stores")


def stage_of(item: pytest.Item) -> str:
    """Returns a test's marked stage, or else the first stage.

    A test that loads TensorFlow, or starts workers or servers, is in the second stage unless
    `promises.toml` names it in the first one.
    """
    if item.nodeid in _BY_DEFAULT:  # this exact case
        return STAGES[0]
    if marked := [stage for stage in STAGES if item.get_closest_marker(stage)]:
        return marked[-1]
    is_slow = any(item.get_closest_marker(mark) for mark in _SLOW)
    name = item.nodeid.partition("[")[0]
    if not NIGHTLY.isdisjoint((item.nodeid, name)):
        return "nightly"
    is_named = not _BY_DEFAULT.isdisjoint((name, name.partition("::")[0]))
    return STAGES[is_slow and not is_named]
