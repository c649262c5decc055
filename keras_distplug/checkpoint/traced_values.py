"""Python values that tracing turns into constants, although callbacks change them later.

`self.model.beta = 0.5` in a callback has no effect on a step that was already traced: it computes
with the earlier value. So must the same step when a resumed run traces it again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from keras_distplug.backend.tensorflow.replicas.touched import Touched
from keras_distplug.python_state.callback_changes import CallbackChanges


class TracedValues:
    """The values at the traces of a model's steps, during one `fit`.

    Args:
        changes: The changes of the callbacks of this `fit`.
        touched: The objects that the model's steps use; keeps the values at their traces.
    """

    def __init__(self, changes: CallbackChanges, touched: Touched) -> None:
        self._changes = changes
        self._touched = touched
        self._lock = threading.Lock()
        self._tracing = 0  # replicas trace a step in separate threads, one after the other
        self._as_stored = contextlib.ExitStack()
        touched.around_trace = self._around

    def capture(self) -> dict[str, list[Any]]:
        """Returns by step, JSON-able, the values at its trace that differ from the initial ones."""
        start = self._changes.small_values_at_start
        return {
            step: [
                {"callback": name, "path": list(path), "value": text}
                for (name, path), text in values.items()
                if start.get((name, path), text) != text
            ]
            for step, values in {**self._touched.stored, **self._touched.at_trace}.items()
        }

    def restore(self, states: Mapping[str, list[Any]]) -> None:
        """Lets the next traces of the steps in `states` use the values that `capture` returned."""
        start = self._changes.small_values_at_start
        for step, differing in states.items():
            there = {(each["callback"], tuple(each["path"])): each["value"] for each in differing}
            self._touched.stored[step] = {**start, **there}

    @contextlib.contextmanager
    def _around(self, step: str) -> Iterator[None]:
        with self._lock:
            self._tracing += 1
            if self._tracing == 1:
                stored = self._touched.stored.get(step, {})
                self._as_stored.enter_context(self._changes.with_small_values(stored))
                self._touched.at_trace[step] = self._changes.small_values()
        try:
            yield
        finally:
            with self._lock:
                self._tracing -= 1
                if not self._tracing:
                    self._as_stored.close()
