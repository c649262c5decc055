"""The saves of one `fit`: when they are made in the background, and how failures are handled."""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, NoReturn, Protocol

from keras_distplug.checkpoint.cadence import Pace, Plan
from keras_distplug.checkpoint.progress_line import show_progress
from keras_distplug.checkpoint.saver import Saver
from keras_distplug.cluster import leaving
from keras_distplug.cluster.channel import Channel
from keras_distplug.core.errors import FencedError, SaveError
from keras_distplug.core.events import Saved, SaveFailed
from keras_distplug.core.log import announce
from keras_distplug.core.reporting import report
from keras_distplug.core.state import TrainState
from keras_distplug.storage import codec
from keras_distplug.storage.commit import Writer
from keras_distplug.storage.meter import Meter


class CheckpointWriter(Protocol):
    """Writes checkpoints to their storage."""

    @property
    def meter(self) -> Meter:
        """The meter of the save in progress."""
        ...

    def save(self, state: TrainState, attempt: str) -> None:
        """Writes a checkpoint. Raises SaveError if it fails."""
        ...


class Saves:
    """The saves of a training job; all workers call the same methods at the same steps.

    Args:
        writer: Writes a checkpoint.
        agreement: The channel between the workers.
        pace: Decides when a checkpoint is due; the chief's decision counts.
        is_chief: True on the worker that decides.
        max_failed_saves: Number of consecutive failed saves that raise an error. None if every
            worker saves for itself, as an addition: it reports its own failures, and training
            continues.
        on_saved: Called, from a thread, with the step of every completed checkpoint.
        is_alone: True for a single worker.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        agreement: Channel,
        pace: Pace,
        *,
        is_chief: bool,
        max_failed_saves: int | None,
        on_saved: Callable[[int], None],
        is_alone: bool = True,
    ) -> None:
        self._writer = writer
        self._agreement = agreement
        self._pace = pace
        self._is_chief = is_chief
        self._is_alone = is_alone
        self._patience = math.inf if max_failed_saves is None else max_failed_saves
        self._is_local = max_failed_saves is None
        self._on_saved = on_saved
        self._what = "local checkpoint" if self._is_local else "checkpoint"
        self._saver = Saver()
        self._attempts = agreement.broadcast("saves", Writer.new_attempt() if is_chief else None)
        self._number = 0
        self.saved_step: int | None = None  # of the newest complete checkpoint
        self._next_look = pace.first_check_step()
        self._stall_s = 0.0
        self._bytes = 0  # size of the newest
        self._failures: list[Exception] = []  # consecutive ones

    def stepped(self, step: int, seconds: float | None) -> bool:
        """Records the end of a step; returns True if `look` has something to do. Runs after every
        step, so it must be cheap.

        Args:
            step: Number of steps since the run started.
            seconds: Duration of the last step; None if it is not representative.
        """
        saver = self._saver
        if seconds is not None:
            self._pace.stepped(seconds, is_saving=not saver.is_idle and saver.is_busy)
        if self._next_look is not None and step >= self._next_look:
            return True
        return not saver.is_idle and saver.has_news

    def look(self, step: int, state: Callable[[], TrainState], *, is_sound: bool) -> None:
        """Reports finished saves, and starts one if it is due at the end of a step.

        Args:
            step: Number of steps since the run started.
            state: Makes the state to save.
            is_sound: False if the state is not worth saving because of a non-finite loss.

        Raises:
            SaveError: If too many consecutive saves have failed.
            FencedError: If another process has taken over the directory.
        """
        self._handle_finished()
        if self._next_look is None or step < self._next_look:
            return
        plan = self._agree(
            lambda: (
                self._pace.plan_at_check(step, time.monotonic(), is_saving=self._saver.is_busy)
                if is_sound
                else Plan(save=False, next_look=step + 1)
            )
        )
        self._next_look = plan.next_look
        if plan.save:
            self.save(state)

    def on_epoch_end(
        self,
        step: int,
        state: Callable[[], TrainState],
        *,
        is_last: bool = False,
        is_best: bool = False,
    ) -> None:
        """Does the same as `look`, at the end of an epoch: the last one, or one to be kept."""
        self._handle_finished()
        plan = self._agree(
            lambda: self._pace.plan_at_epoch_end(
                step,
                time.monotonic(),
                is_saving=self._saver.is_busy,
                is_last=is_last,
                is_best=is_best,
            )
        )
        if plan.save:
            self.save(state)

    def save(self, state: Callable[[], TrainState]) -> None:
        """Saves in the background, once the save in progress has finished."""
        start_s = time.monotonic()
        self._wait_for_saver()
        self._handle_finished()
        self._number += 1
        attempt = f"{self._attempts}-{self._number}"
        taken = state()

        def write() -> None:
            self._writer.save(taken, attempt)
            self._bytes = codec.count_bytes(codec.make_specs(taken.arrays))
            self._on_saved(taken.cursor.step)

        self._saver.start(taken.cursor.step, write)
        self._stall_s = time.monotonic() - start_s

    def save_in_time(
        self,
        step: int,
        state: Callable[[], TrainState],
        left_s: float | None,
        *,
        is_sound: bool,
    ) -> None:
        """Saves the current state if it is not saved yet, and waits for that, if time permits.

        Args:
            step: Number of steps since the run started.
            state: Makes the state to save.
            left_s: Remaining time in seconds. None for no limit.
            is_sound: As in `look`.
        """
        end_s = None if left_s is None else time.monotonic() + left_s
        failed = self._wait_until(end_s)
        is_time = end_s is None or time.monotonic() + self._pace.duration_s < end_s
        reply = map(
            json.loads,
            self._agreement.gather(
                "last save", json.dumps([self.saved_step == step, is_time, failed])
            ),
        )
        saved, are_in_time, failures = zip(*reply, strict=True)
        if all(saved) or not is_sound:
            return
        why = next((each for each in failures if each is not None), None)
        if why is None and not are_in_time[0]:
            why = (
                f"the {left_s or 0:.1f} s until this process may be killed are too short for "
                "another save, judging by the last one"
            )
        if why is None:
            self.save(state)
            failed = self._wait_until(end_s)
            if failed is None and self.saved_step != step:
                failed = str(self._failures[-1])
            why = self._agreement.first_error("last saved", failed)
        if why is not None and self._is_chief:
            announce(f"no {self._what} of step {step} was saved: {why}")

    def _wait_until(self, end_s: float | None) -> str | None:
        """Waits for the save in progress. Returns the reason if it has not finished."""
        try:
            self._wait_for_saver(None if end_s is None else max(0.0, end_s - time.monotonic()))
        except SaveError as error:
            return str(error)
        self._handle_finished()
        return None

    @property
    def is_busy(self) -> bool:
        """True if a save is in progress."""
        return self._saver.is_busy

    def await_idle(self) -> None:
        """Waits for a save in progress, without reporting its result. Callable from any thread."""
        with contextlib.suppress(SaveError):
            self._saver.wait()

    def wait(self) -> None:
        """Waits for the save in progress."""
        self._wait_until(None)

    def finish(self) -> None:
        """Waits for the last save.

        Raises:
            SaveError: If it has failed.
        """
        self._wait_for_saver()
        self._handle_finished()
        if self._failures and not self._is_local:
            if isinstance(self._failures[-1], FencedError):
                self._end_fenced(self._failures[-1])
            raise self._failures[-1]
        if self._pace.skipped and self._is_chief:
            several = f"{self._pace.skipped} scheduled {self._what}s were"
            which = f"1 scheduled {self._what} was" if self._pace.skipped == 1 else several
            announce(f"{which} skipped, because an earlier one was still being written")

    def _wait_for_saver(self, timeout_s: float | None = None) -> None:
        """Raises SaveError if the save in progress takes longer."""
        if not self._saver.is_busy:
            return
        what = f"writing {self._what} of step {self._saver.step}"
        with show_progress(what, self._writer.meter, is_shown=self._is_chief):
            self._saver.wait(timeout_s)

    def _agree(self, plan: Callable[[], Plan]) -> Plan:
        message = None
        if self._is_chief:
            too_many = len(self._failures) >= self._patience
            failed = str(self._failures[-1]) if too_many else None
            fenced = next((str(e) for e in self._failures if isinstance(e, FencedError)), None)
            message = json.dumps({"failed": failed, "fenced": fenced, "plan": asdict(plan())})
        reply = json.loads(self._agreement.broadcast("save", message))
        if reply["fenced"] is not None:
            self._end_fenced(FencedError(reply["fenced"]))
        if reply["failed"] is not None:
            raise SaveError(
                "Training ends, because checkpoints could not be written (consecutive failures: "
                f"{self._patience}). Last error: {reply['failed']}"
            )
        return Plan(**reply["plan"])

    def _handle_finished(self) -> None:
        for saved in self._saver.finished():
            if saved.error is None:
                self._failures = []
                self.saved_step = saved.step
                report(Saved(saved.step, saved.seconds, self._is_local, self._stall_s, self._bytes))
                self._pace.saved(self._stall_s, saved.seconds)
                self._report_interval()
                continue
            self._failures.append(saved.error)
            if isinstance(saved.error, FencedError):
                if self._is_alone:
                    self._end_fenced(saved.error)
                continue  # all workers end at the same step, after the chief's next message
            report(SaveFailed(saved.step, len(self._failures), self._is_local, str(saved.error)))
            if self._is_local or self._is_chief:
                end = "" if self._is_local else f"; training ends after {self._patience}"
                warnings.warn(
                    f"Saving a {self._what} failed or takes too long (consecutive failures: "
                    f"{len(self._failures)}{end}). {saved.error}",
                    stacklevel=2,
                )

    def _end_fenced(self, error: FencedError) -> NoReturn:
        leaving.is_fenced()
        raise error

    def _report_interval(self) -> None:
        interval_s, cost_s = self._pace.interval_s, self._pace.cost_s
        if not self._is_chief or not self._pace.is_automatic or not interval_s or cost_s is None:
            return
        announced_s = _announced_s.get(self._what)
        if announced_s is None or not 1 / 3 < interval_s / announced_s < 3:
            _announced_s[self._what] = interval_s
            announce(
                f"a {self._what} costs training {cost_s:.3f} s, so one is saved every "
                f"{interval_s:.1f} s"
            )


_announced_s: dict[str, float] = {}
"""The intervals that this process announced last: one line for a loop of `fit` calls."""


def save_all_in_time(
    all_saves: Iterable[Saves],
    step: int,
    state: Callable[[], TrainState],
    left_s: float | None,
    *,
    is_sound: bool,
) -> int | None:
    """Calls `save_in_time` of all, as far as time permits. Returns the newest step saved."""
    end_s = None if left_s is None else time.monotonic() + left_s
    steps = []
    for saves in all_saves:
        rest_s = None if end_s is None else end_s - time.monotonic()
        saves.save_in_time(step, state, rest_s, is_sound=is_sound)
        steps.append(saves.saved_step)
    return max((each for each in steps if each is not None), default=None)


def is_finite(logs: Mapping[str, Any] | None) -> bool:
    """Returns True if a model with these logs is worth saving."""
    loss = (logs or {}).get("loss")
    return loss is None or math.isfinite(float(loss))
