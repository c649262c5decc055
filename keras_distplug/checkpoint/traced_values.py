"""Python values that tracing turns into constants, although callbacks change them later.

`self.model.beta = 0.5` in a callback has no effect on a step that was already traced: it computes
with the earlier value. So must the same step when a resumed run traces it again. If Keras traces a
step for several batch sizes, every trace uses the values at its time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_distplug.backend.tensorflow.replicas.retraces import Request, Retraces
from keras_distplug.backend.tensorflow.replicas.touched import Touched
from keras_distplug.python_state.callback_changes import CallbackChanges, SmallValues


class TracedValues:
    """The values at the traces of a model's steps, during one `fit`.

    Args:
        changes: The changes of the callbacks of this `fit`.
        touched: The objects that the model's steps use; keeps the values at their traces.
        retraces: The shapes that the model's steps were traced for.
    """

    def __init__(self, changes: CallbackChanges, touched: Touched, retraces: Retraces) -> None:
        self._changes = changes
        self._touched = touched
        self._retraces = retraces
        self._lock = threading.Lock()
        self._tracing = 0  # replicas trace a step in separate threads, one after the other
        self._as_stored = contextlib.ExitStack()
        touched.around_trace = self._around

    def capture(self) -> dict[str, Any]:
        """Returns by step, JSON-able, the values at its trace that differ from the initial ones,
        and the shapes that it was traced for, with the values at every one of these traces."""
        values = {**self._touched.stored, **self._touched.at_trace}
        if not values:
            return {}
        requests = {**self._retraces.stored, **self._retraces.made}
        return {
            "traced": {step: self._differing(each) for step, each in values.items()},
            "traced_for": {
                step: [
                    {"shapes": list(each.shapes), "values": self._differing(each.values)}
                    for each in made
                ]
                for step, made in requests.items()
            },
        }

    def _differing(self, values: SmallValues) -> list[Any]:
        start = self._changes.small_values_at_start
        return [
            {"callback": name, "path": list(path), "value": text}
            for (name, path), text in values.items()
            if start.get((name, path), text) != text
        ]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Lets the next traces of the steps in `state` use the values that `capture` returned."""
        for step, differing in state.get("traced", {}).items():
            self._touched.stored[step] = self._values(differing)
        for step, requests in state.get("traced_for", {}).items():
            self._retraces.stored[step] = [
                Request(
                    tuple(None if shape is None else tuple(shape) for shape in each["shapes"]),
                    self._values(each["values"]),
                )
                for each in requests
            ]

    def _values(self, differing: Sequence[Any]) -> SmallValues:
        there = {(each["callback"], tuple(each["path"])): each["value"] for each in differing}
        return {**self._changes.small_values_at_start, **there}

    @contextlib.contextmanager
    def _around(self, step: str) -> Iterator[None]:
        with self._lock:
            self._tracing += 1
            if self._tracing == 1:
                stored = self._touched.stored.get(step, {})
                self._as_stored.enter_context(self._changes.replace_small_values(stored))
                self._touched.at_trace[step] = self._changes.small_values()
        try:
            yield
        finally:
            with self._lock:
                self._tracing -= 1
                if not self._tracing:
                    self._as_stored.close()
