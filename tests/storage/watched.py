"""Files that write down what is asked of them, and fail when told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_distplug.storage.files import Files


class WatchedFiles:
    """`files`, watched.

    Attributes:
        calls: Every method that was called, with its path.
        fired: How often `fail` has made one fail.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self.traits = files.traits
        self._faults: list[tuple[str, str, OSError, bool]] = []
        self.calls: list[tuple[str, str]] = []
        self.fired = 0
        self._left: int | None = None

    def fail(self, method: str, part: str, error: OSError) -> None:
        """From now on `method` raises `error` if its path holds `part`."""
        self._faults.append((method, part, error, False))

    def lose_reply(self, method: str, part: str, error: OSError) -> None:
        """As `fail`, but `method` does what it is asked before."""
        self._faults.append((method, part, error, True))

    def mend(self) -> None:
        self._faults.clear()

    def mend_after(self, times: int) -> None:
        """Lets what `fail` said happen so often, and then no more."""
        self._left = times

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(path: str = "", *args: Any) -> Any:
            self.calls.append((method, path))
            for failing, part, error, is_done in self._faults:
                if method == failing and part in path and self.fired != self._left:
                    if is_done:
                        getattr(self._files, method)(path, *args)
                    self.fired += 1
                    raise error
            return getattr(self._files, method)(path, *args)

        return call
