"""An in-memory key-value store."""

from __future__ import annotations

import threading


class Memory:
    """Key-values whose `get` waits for the key.

    Attributes:
        breaks_at: A key at which the process that keeps the store is gone.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.breaks_at: str | None = None

    def put(self, key: str, value: str) -> None:
        assert self.put_first(key, value)

    def put_first(self, key: str, value: str) -> bool:
        self._read_process(key)
        with self.changed:
            if key in self.values:
                return False
            self.values[key] = value
            self.changed.notify_all()
            return True

    def get(self, key: str, timeout_s: float | None) -> str:
        self._read_process(key)
        if not self.wait_for(key, timeout_s):
            raise TimeoutError(key)
        return self.values[key]

    def wait_for(self, key: str, timeout_s: float | None = 10) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: key in self.values, timeout_s)

    def delete(self, key: str) -> None:
        with self.changed:
            for each in [each for each in self.values if f"{each}/".startswith(f"{key}/")]:
                del self.values[each]

    def barrier(self, key: str, timeout_s: float) -> None:
        raise ConnectionError(f"{key}: socket closed")

    def _read_process(self, key: str) -> None:
        if key == self.breaks_at:
            raise ConnectionError(f"{key}: socket closed")
