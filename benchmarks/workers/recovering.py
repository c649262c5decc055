"""The training into which `recovery.py` injects faults, the same for ours.py and plain.py."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from events import EPOCH_STEPS, FAULT_BATCH, Events

BATCH, FEATURES, WIDTH, CLASSES = 1024, 64, 512, 10


def build() -> keras.Model:
    """Returns a perceptron with 0.56 M weights, 7 MB with Adam's slots."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,))])
    for _ in range(3):
        model.add(keras.layers.Dense(WIDTH, "relu"))
    model.add(keras.layers.Dense(CLASSES))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Harm(keras.callbacks.Callback):  # type: ignore[misc]
    """Records every batch, and injects the fault of this attempt, `every` epochs after the previous
    attempt's.

    Args:
        events: The events to record in.
        worker: The index of the worker to hit.
        every: The number of epochs from one fault to the next.
        faults: The faults by attempt; later attempts have none.
        lone_collective: A function that calls a collective on this worker only.
    """

    def __init__(
        self,
        events: Events,
        worker: int,
        every: int,
        faults: list[str],
        lone_collective: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._events = events
        is_hit = events.worker == worker and events.attempt < len(faults)
        self._fault = faults[events.attempt] if is_hit else None
        self._fault_epoch = every * (events.attempt + 1)
        self._epoch = -1
        self._how: dict[str, Callable[[], object] | None] = {
            "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
            "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "lock": lambda: ctypes.PyDLL(None).sleep(10_000),
            "input": lambda: threading.Event().wait(),
            "collective": lone_collective,
        }

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = self._epoch * EPOCH_STEPS + batch + 1
        iterations = int(self.model.optimizer.iterations.numpy())
        self._events.note("batch", step=step, iterations=iterations)
        if self._fault != "input":
            self._make(batch + 1)

    def on_input(self, index: int) -> None:
        """Called before batch `index` is created, a few steps before training needs it."""
        if self._fault == "input":
            self._make(index)

    def _make(self, batches: int) -> None:
        if self._fault is None or (self._epoch, batches) != (self._fault_epoch, FAULT_BATCH):
            return
        how = self._how[self._fault]
        assert how is not None
        self._events.note("fault")
        how()


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Random data, the same every time."""

    def __init__(self, harm: Harm) -> None:
        super().__init__()
        self._harm = harm
        rng = np.random.default_rng(0)
        self._x = rng.normal(size=(EPOCH_STEPS * BATCH, FEATURES)).astype("float32")
        self._y = rng.integers(0, CLASSES, EPOCH_STEPS * BATCH)

    def __len__(self) -> int:
        return EPOCH_STEPS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self._harm.on_input(index)
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self._x[rows], self._y[rows]
