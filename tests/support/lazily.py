"""Modules that are imported on first use, so that tests can be collected without them."""

from __future__ import annotations

import importlib
from typing import Any


class Lazily:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
