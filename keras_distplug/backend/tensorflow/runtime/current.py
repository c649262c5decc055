"""What a thread is at. Replicas are traced in threads, each with something of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Kind = TypeVar("Kind")


class Current(threading.local, Generic[Kind]):
    """What this thread is at; None if it is at nothing."""

    now: Kind | None = None

    @contextmanager
    def at(self, what: Kind | None) -> Iterator[None]:
        """Makes `what` the current one, meanwhile."""
        before, self.now = self.now, what
        try:
            yield
        finally:
            self.now = before
