"""A thread-local current object. Replicas are traced in separate threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Kind = TypeVar("Kind")


class Current(threading.local, Generic[Kind]):
    """The current object of this thread, or None."""

    now: Kind | None = None

    @contextmanager
    def at(self, what: Kind | None) -> Iterator[None]:
        """Makes `what` the current object within the `with` block."""
        before, self.now = self.now, what
        try:
            yield
        finally:
            self.now = before
