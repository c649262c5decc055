"""The callback that ends a training job that no longer makes progress."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import keras

from keras_distplug.backend.tensorflow.runtime import callback_list
from keras_distplug.backend.tensorflow.runtime.whereabouts import (
    is_debugged,
    may_be_debugged,
    stacks,
    whereabouts,
)
from keras_distplug.callbacks.run_keeper import keeper_among
from keras_distplug.callbacks.watchdog import Watchdog
from keras_distplug.cluster import agreement
from keras_distplug.cluster.listeners import close_at_exit
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.events import Hung
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.interactive import is_interactive
from keras_distplug.core.reporting import report
from keras_distplug.core.supervised import Phase, Supervised
from keras_distplug.hang.patience import SHORT_S, Patience, Stage
from keras_distplug.hang.sentinel import Sentinel
from keras_distplug.hang.verdict import ClusterInquiry, Inquiry, Report

Limit = Literal["auto"] | float

_LOOK_S = 0.5
_ASKING_S = 5.0
_SENTINEL_S = 1.0  # lets the sentinel of a worker that does not answer print its stacks first
_LAST_WORDS_S = 2.0
_STACKS_S = 10.0  # longer, because source lines are read from files
_CLOSING_S = 5.0


class _Progress(NamedTuple):
    """The last progress of training."""

    number: int
    stage: Stage
    doing: str  # "in batch {} of", or without a batch
    batch: int
    epoch: int
    at_s: float

    @property
    def where(self) -> str:
        of_epoch = f" epoch {self.epoch + 1}" if self.number else ""
        return self.doing.format(self.batch + 1) + of_epoch


class HangWatchdog(Watchdog):
    """Ends the process when training hangs, and reports the worker that the others wait for.

    All workers stop making progress when one of them does: its process is suspended, its input
    pipeline blocks, C code keeps Python from running, or it has diverged from the others and waits
    for a collective that they do not call. When a worker makes no progress for longer than its
    limit, it asks all others for their progress. The cause is the worker with the least progress,
    or the one that does not answer; while it is still within its own limit, the others wait for it.

    Then all workers print the stacks of their threads, save them in the folder `hangs` alongside
    the run's folder, and exit with code 200, which schedulers treat as retryable. When the script
    is started again, training resumes from the newest checkpoint.

    Example:

    ```python
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), kd.HangWatchdog(step_secs=30)])
    ```

    - It is one of `defaults()`; adding your own instance replaces that one.
    - Time during which the process is suspended (ctrl-Z) or paused in a debugger (pdb, or that of
      an editor) does not count.
    - While C code holds the interpreter's lock, no Python thread can run. Then a small companion
      process ends this one with SIGABRT, which prints the stacks, too. On Linux only.

    Args:
        step_secs: The limit for a batch in seconds, or for as many batches as
            `steps_per_execution`. `"auto"` is five times the longest batch so far, including the
            first one, and at least five minutes. Defaults to `"auto"`.
        first_step_secs: The limit in seconds for the first batch, including restoring and tracing
            before it, and for the first batch of a validation. Defaults to 3600.
        validation_secs: The limit in seconds for a batch of a validation; `"auto"` as in
            `step_secs`. Defaults to `"auto"`.
        save_secs: The limit in seconds for the time between two batches, in which callbacks run and
            checkpoints are saved. `"auto"` is five times the longest time so far, and at least an
            hour. Defaults to `"auto"`.
        exit: `True` ends the process. `False` only reports a hang, once. Defaults
            to `True`, unless Python is interactive.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    def __init__(
        self,
        step_secs: Limit = "auto",
        *,
        first_step_secs: float = 3600.0,
        validation_secs: Limit = "auto",
        save_secs: Limit = "auto",
        exit: bool | None = None,
    ) -> None:
        super().__init__()
        given: dict[str, Limit] = {
            "step_secs": step_secs,
            "first_step_secs": first_step_secs,
            "validation_secs": validation_secs,
            "save_secs": save_secs,
        }
        for name, value in given.items():
            has_auto = name != "first_step_secs"
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and float(value) > 0) and not (has_auto and value == "auto"):
                raise ConfigurationError(
                    f"Expected `{name}` to be a number of seconds > 0"
                    + ", or 'auto'" * has_auto
                    + f". Received: {value!r}"
                )
        self.step_secs = step_secs
        self.first_step_secs = first_step_secs
        self.validation_secs = validation_secs
        self.save_secs = save_secs
        self.exit = exit
        self._is_first = self._is_first_test = True
        self._undo: list[Callable[[], None]] = []

    # Keras hooks, in the order in which they are called

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        callback_list.move_to_front(self)  # to also watch the `on_train_begin` of other callbacks

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.close()
        others = callback_list.move_to_front(self)
        if self.defers_to_other(others):
            return
        self._keeper = keeper_among(others)
        self._role = agreement.get_role(self.model.distribute_strategy)
        self._agreement = agreement.get_channel(self._role)
        self._patience = Patience(self._limits())
        self._training_thread = threading.get_ident()
        self._fit = callback_list.Calling.now()
        self._epoch = 0
        self._is_first = self._is_first_test = True
        self._progress = _Progress(
            0, Stage.FIRST_STEP, "before the first batch", 0, 0, time.monotonic()
        )
        self._stall = (self._progress, 0.0)
        self._ending = threading.Lock()
        self._over = threading.Event()
        self._inquiry = self._make_inquiry()
        self._undo.append(self._inquiry.close)
        self._exits = self.exit or (self.exit is None and not is_interactive())
        self._sentinel = None
        if self._exits:
            self._sentinel = Sentinel(self._role.name, self._patience.limits_s[Stage.FIRST_STEP])
            self._undo.append(self._sentinel.close)
        watch = threading.Thread(target=self._watch, name="keras_distplug-hangs", daemon=True)
        watch.start()
        self._undo.append(lambda: self._stop_watch(watch))
        close_at_exit(self)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._record_progress(Stage.BETWEEN, "before the first batch of")

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        stage = Stage.FIRST_STEP if self._is_first else Stage.STEP
        self._record_progress(stage, "in batch {} of", batch)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._is_first = False
        self._record_progress(Stage.BETWEEN, "after batch {} of", batch)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._record_progress(Stage.BETWEEN, "before the validation of")

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        first = self._is_first_test
        stage = Stage.FIRST_VALIDATION_STEP if first else Stage.VALIDATION_STEP
        self._record_progress(stage, "in batch {} of the validation of", batch)

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._is_first_test = False
        self._record_progress(Stage.BETWEEN, "after batch {} of the validation of", batch)

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._record_progress(Stage.BETWEEN, "after the validation of")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._record_progress(Stage.BETWEEN, "at the end of")

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        # Keep watching until all workers are here: another one may still send an inquiry.
        self._agreement.barrier("end of the watch")
        self.close()

    def close(self) -> None:
        """Stops watching."""
        while self._undo:
            self._undo.pop()()

    # Internals

    def _limits(self) -> dict[Stage, float]:
        given = {
            Stage.FIRST_STEP: self.first_step_secs,
            Stage.STEP: self.step_secs,
            Stage.FIRST_VALIDATION_STEP: self.first_step_secs,
            Stage.VALIDATION_STEP: self.validation_secs,
            Stage.BETWEEN: self.save_secs,
        }
        return {stage: float(limit) for stage, limit in given.items() if limit != "auto"}

    def _make_inquiry(self) -> Inquiry:
        if self._role.world_size == 1:
            return Inquiry(self._role.name, self._report)
        return ClusterInquiry(self._agreement.session("watch"), self._report, self._end)

    def _record_progress(self, stage: Stage, doing: str, batch: int = 0) -> None:
        """Runs twice per step, so it must be cheap."""
        if not self._undo:
            return  # called by an `evaluate` that uses the same callbacks
        before, now_s = self._progress, time.monotonic()
        if (took_s := now_s - before.at_s) > SHORT_S:
            self._patience.record_duration(before.stage, took_s)
        # Calling `_Progress` runs a Python function that does just this, and takes longer.
        self._progress = tuple.__new__(
            _Progress, (before.number + 1, stage, doing, batch, self._epoch, now_s)
        )
        self._update_sentinel(self._patience.limits_s[stage])

    def _report(self) -> Report:
        """Describes this worker's state. Called from any thread."""
        progress, (stalled_at, stalled_s) = self._progress, self._stall
        is_at = whereabouts(self._training_thread)
        if is_at.awaits is not None:
            awaited = {"input": "its input", "others": "other workers"}[is_at.awaits]
            doing = f"waits for {awaited} {progress.where}"
        elif is_at.line:
            doing = f"runs {is_at.line}, {progress.where}"
        else:
            doing = f"is {progress.where}"
        if is_at.input_line:
            doing += f", with its input produced at {is_at.input_line}"
        return Report(
            moments=progress.number,
            doing=doing,
            awaits=is_at.awaits,
            for_s=stalled_s if stalled_at is progress else 0.0,  # not yet seen by the watch
            limit_s=self._patience.limits_s[progress.stage],
            silence_s=_SENTINEL_S
            + max(self._patience.limits_s[stage] for stage in (progress.stage, Stage.BETWEEN)),
        )

    def _watch(self) -> None:
        try:
            self._watch_loop()
        finally:
            self._end_sentinel()  # otherwise it would take this thread's end for a hang

    def _watch_loop(self) -> None:
        looked_s, ask_at_s = time.monotonic(), 0.0
        while not self._over.wait(_LOOK_S):
            progress, now_s = self._progress, time.monotonic()
            # A longer wait than requested means that the process was suspended: cap it.
            passed_s, looked_s = min(now_s - looked_s, 2 * _LOOK_S), now_s
            limit_s = self._patience.limits_s[progress.stage]
            self._update_sentinel(limit_s)
            stalled_at, stalled_s = self._stall
            if progress is not stalled_at:
                self._stall, ask_at_s = (progress, 0.0), 0.0
                continue
            if is_debugged(self._training_thread):
                # Do not inspect frames here: that would undo changes to local variables in `pdb`.
                self._stall = (progress, 0.0)
                continue
            stalled_s += passed_s
            self._stall = (progress, stalled_s)
            if not self._is_in_fit():
                self._inquiry.close()
                return
            if stalled_s < limit_s or now_s < ask_at_s:
                continue
            self._update_sentinel(limit_s + _ASKING_S)
            verdict = self._inquiry.ask()
            looked_s = time.monotonic()
            self._stall = (progress, stalled_s + looked_s - now_s)
            ask_at_s = now_s + verdict.look_again_s
            if verdict.hang is not None and self._progress is progress:
                self._inquiry.report_hang(verdict.hang)
                self._end(verdict.hang)
                ask_at_s = math.inf  # report a hang only once

    def _is_in_fit(self) -> bool:
        """True while `fit` runs; False once an exception has ended it."""
        trains = sys._current_frames().get(self._training_thread)
        return self._fit is not None and self._fit.is_above(trains)

    def _end(self, hang: str) -> None:
        """Reports a hang and ends the process. Called from any thread."""
        if not self._ending.acquire(blocking=False):
            return
        self._end_sentinel()
        who = f"{self._role.name} on {socket.gethostname()}"
        lines = [f"keras_distplug: training hangs: {hang}\n"]
        listed = f"{who}: stacks of all threads, most recent call last:\n"
        _run_with_limit(lambda: lines.append(f"{listed}{stacks()}\n"), _STACKS_S)
        text = "".join(lines)
        _run_with_limit(lambda: _write(text))
        _run_with_limit(lambda: report(Hung(hang)))
        if self._keeper is not None:
            name = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{self._role.name}.txt"
            keep, data = self._keeper.keep_file, [text.encode(errors="replace")]
            _run_with_limit(
                lambda: _write(f"keras_distplug: saved to {keep(f'hangs/{name}', data)}\n")
            )
        if not self._exits:
            self._ending.release()
            return
        if (supervised := Supervised.from_env()) is not None:
            report_phase = supervised.report
            _run_with_limit(lambda: report_phase(self._role.name, Phase.HUNG, hang))
        self._inquiry.leave()
        code = int(ExitCode.HUNG)
        last = f"keras_distplug: {who} exits with code {code}; restart the script to resume\n"
        _run_with_limit(lambda: _write(last))
        _run_with_limit(_flush)
        os._exit(code)

    def _update_sentinel(self, limit_s: float) -> None:
        if self._sentinel is not None:
            self._sentinel.say(math.inf if may_be_debugged() else limit_s)

    def _end_sentinel(self) -> None:
        if self._sentinel is not None:
            self._sentinel.close()

    def _stop_watch(self, watch: threading.Thread) -> None:
        self._over.set()
        if watch is not threading.current_thread():
            watch.join(_CLOSING_S)


def _write(text: str) -> None:
    """Writes to stderr without Python's file objects, whose locks the hanging thread may hold."""
    left = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(2, left) :]


def _flush() -> None:
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            file.flush()


def _run_with_limit(act: Callable[[], object], limit_s: float = _LAST_WORDS_S) -> None:
    """Calls `act` with a time limit: a pipe that is not read, or a store that does not answer, must
    not keep the process from ending."""
    thread = threading.Thread(target=act, name="keras_distplug-last-words", daemon=True)
    thread.start()
    thread.join(limit_s)
