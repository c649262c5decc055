"""Replaces methods of Keras and TensorFlow. No other module does so directly.

Every module that patches declares, with an `Upstream`, the versions concerned and the upstream
issue.
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
_FILTER = "error_handler"  # the function that `traceback_utils.filter_traceback` returns


def override(target: object, name: str, value: Any) -> None:
    """Replaces a public method of one object, bypassing Keras' attribute tracking."""
    object.__setattr__(target, name, value)


@dataclass(frozen=True)
class Upstream:
    """The upstream versions and the issue that a module's patches are for.

    Args:
        keras: The versions of Keras that the patches were written for; None if independent.
        tensorflow: The versions of TensorFlow; None if independent.
        issue: The upstream issue that describes the reason; None without an issue, or if upstream
            is not wrong but lacks a public API.
    """

    keras: str | None = None
    tensorflow: str | None = None
    issue: str | None = None

    def patch(self, target: Any, name: str, value: Any) -> None:
        """Replaces an attribute of `target`, which is an object, class or module.

        Raises:
            VersionError: If the attribute does not exist, because upstream has changed.
        """
        self._require(target, name)
        if isinstance(target, type | ModuleType):
            setattr(target, name, value)
        else:
            override(target, name, value)

    def wrap(self, owner: type, name: str, wrap: Callable[[Function], Function]) -> None:
        """Wraps a method of a Keras class, inside Keras' traceback filter if the method has one.

        This also affects a call whose arguments are still being evaluated: in
        `model.fit(..., callbacks=defaults())`, Python looks up `fit` before it calls `defaults`.

        Args:
            owner: The class.
            name: The name of the method.
            wrap: A function that receives the original function and returns its replacement.
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
        """Like `patch`, but undone at the end of the `with` block."""
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
