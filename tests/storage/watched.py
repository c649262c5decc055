"""Files that record their calls, and fail on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_distplug.storage.files import Files


class WatchedFiles:
    """Wraps `files`, recording calls.

    Attributes:
        calls: The methods called, with their paths.
        fired: The number of failures caused by `fail`.

    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self.traits = files.traits
        self._faults: list[tuple[str, str, OSError, bool]] = []
        self.calls: list[tuple[str, str]] = []
        self.fired = 0
        self._left: int | None = None

    def fail(self, method: str, part: str, error: OSError) -> None:
        """Makes `method` raise `error` from now on if its path contains `part`."""
        self._faults.append((method, part, error, False))

    def lose_reply(self, method: str, part: str, error: OSError) -> None:
        """Makes `method` fail as `fail` does, but only after it was executed."""
        self._faults.append((method, part, error, True))

    def mend(self) -> None:
        self._faults.clear()

    def mend_after(self, times: int) -> None:
        """Limits the failure set by `fail` to this many calls."""
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
