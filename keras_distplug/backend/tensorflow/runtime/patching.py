"""Replaces methods of Keras and TensorFlow: the only place that does so.

Every module that needs it says with an `Upstream` which versions that is for, and where upstream
knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from keras_distplug.backend.tensorflow.runtime import versions

Function = Callable[..., Any]

_MISSING = object()
_FILTER = "error_handler"  # what `keras.src.utils.traceback_utils.filter_traceback` returns


def override(target: object, name: str, value: Any) -> None:
    """Replaces a public method of one object, past Keras' tracking of attributes."""
    object.__setattr__(target, name, value)


@dataclass(frozen=True)
class Upstream:
    """What a module replaces, and why.

    Args:
        keras: The versions of Keras that it was written for, if it depends on them.
        tensorflow: Those of TensorFlow.
        issue: Where upstream knows of the reason; None if it does not, or if there is nothing
            wrong, only nothing public.
    """

    keras: str | None = None
    tensorflow: str | None = None
    issue: str | None = None

    def patch(self, target: Any, name: str, value: Any) -> None:
        """Replaces what `target`, an object, class or module, has under a name.

        Raises:
            VersionError: If it has nothing there, so that upstream has changed.
        """
        self._require(target, name)
        if isinstance(target, type | ModuleType):
            setattr(target, name, value)
        else:
            override(target, name, value)

    def wrap(self, owner: type, name: str, wrap: Callable[[Function], Function]) -> None:
        """Wraps a method of a class of Keras' below Keras' filter of tracebacks, if it has that.

        Then a call is wrapped, too, whose arguments are being evaluated: for
        `model.fit(..., callbacks=defaults())` Python looks up `fit` before it calls `defaults`.

        Args:
            owner: The class.
            name: Of the method.
            wrap: Returns what is called instead of what it is given.
        """
        method: Any = vars(owner).get(name)
        while method is not None:
            cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
            if method.__code__.co_name == _FILTER and "fn" in cells:
                cells["fn"].cell_contents = wrap(cells["fn"].cell_contents)
                return
            method = getattr(method, "__wrapped__", None)
        self.patch(owner, name, wrap(getattr(owner, name)))

    @contextmanager
    def patched(self, target: Any, name: str, value: Any) -> Iterator[None]:
        """As `patch`, and undoes it."""
        before = vars(target).get(name, _MISSING)
        self.patch(target, name, value)
        try:
            yield
        finally:
            if before is not _MISSING:
                self.patch(target, name, before)
            elif isinstance(target, type | ModuleType):
                delattr(target, name)
            else:
                object.__delattr__(target, name)

    def _require(self, target: Any, name: str) -> None:
        if name in vars(target) or hasattr(type(target), name) or hasattr(target, name):
            return
        kind = target if isinstance(target, type) else type(target)
        place = f"{kind.__module__}.{kind.__name__}"
        place = target.__name__ if isinstance(target, ModuleType) else place
        raise versions.missing_name(f"{place} to have `{name}`", str(self))

    def __str__(self) -> str:
        named = {"Keras": self.keras, "TensorFlow": self.tensorflow}
        ranges = [f"{name} {range_}" for name, range_ in named.items() if range_ is not None]
        return " and ".join(ranges) + (f" ({self.issue})" if self.issue else "")
