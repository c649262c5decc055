"""Runs first in every process that a test starts, and makes it start in two thirds of the time.

Keras and TensorFlow load pandas, SciPy and scikit-learn, if installed, only to recognize their
types. This hides these packages from Keras and TensorFlow, but not from other importers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OPTIONAL = {"pandas", "scipy", "sklearn"}
_ASKING = {"keras", "tensorflow"}


class _NotForKeras(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _OPTIONAL and _who_imports().partition(".")[0] in _ASKING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def _who_imports() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


sys.meta_path.insert(0, _NotForKeras())
