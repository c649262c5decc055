"""Windows of steps, measured by every worker and collected on the chief."""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import keras
import numpy as np

from keras_distplug.backend.tensorflow.replicas import steps
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled, replicas_here
from keras_distplug.cluster import agreement
from keras_distplug.cluster.channel import Channel
from keras_distplug.cluster.listeners import Reports
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import AgreementError
from keras_distplug.core.log import announce
from keras_distplug.step.instrumentation import StepInstrumentation
from keras_distplug.step.step_reports import ReplicaReport, StepReport, as_text, from_text
from keras_distplug.step.stopwatch import Lap, Stopwatch, Sync, listen

_STATM = "/proc/self/statm"
_MOST_IN_GRAPH = 1024  # steps to fetch in one go, well below `recorded_times.KEPT`
_SAME_S = 0.001  # tolerance between two clocks


class OwnWindows:
    """Makes a `StepReport` of every window of steps on this worker.

    Args:
        model: The model that `fit` is about to train. Create this object in a callback's
            `set_model`, because Keras builds the step before `on_train_begin`.
        syncs: True to measure how long every replica waits for the sum of gradients.
        readings: True to record losses and gradient norms.
        fingerprints: True to record fingerprints of the data.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        syncs: bool = False,
        readings: bool = False,
        fingerprints: bool = False,
    ) -> None:
        self._model = model
        self._stopwatch = StepInstrumentation.of(model).shared(Stopwatch)
        self._measurements = listen(
            model, syncs=syncs, readings=readings, fingerprints=fingerprints
        )
        self.role: Role = agreement.get_role(model.distribute_strategy)
        self.where = f"{self.role.name} on {socket.gethostname()}"
        self.seen = 0  # steps of this window
        self._step = 0
        self._before: int | None = None
        self._is_scheduled = is_scheduled(model.distribute_strategy)
        self._is_listening = False

    @property
    def updates(self) -> int:
        """The number of updates by the optimizer's count, which continues after a restart.

        If another process holds that count, this is the number of steps scheduled. The count is
        read only once then, because reading takes as long as a small step, and the other process
        may be lost.
        """
        optimizer = self._model.optimizer
        if optimizer is None:
            return self._step
        if not self._is_scheduled:
            return int(optimizer.iterations.numpy())
        return (self._before or 0) + self._step

    def disable_counting(self) -> None:
        """Cancels the measurement. Call it if `set_model` was not called by `fit`."""
        StepInstrumentation.of(self._model).use_none()

    def begin(self) -> None:
        """Starts measuring. Call it from `on_train_begin`."""
        self.close()
        self._steps_s: list[float] = []
        self._waits = _Waits()
        self._starts: list[float] = []  # start times of steps not yet matched with the graph's
        self._in_graph = 0  # number of steps since then
        self._replicas_here = replicas_here(self._model.distribute_strategy)
        self._traces = self._measurements.traces
        self._batch_start_s = 0.0
        self._is_in_graph = self._stopwatch.is_in_graph
        self._step_start_s: float | None = None  # stays None for the first step, which is traced
        self._is_first = True
        self.seen = self._step = 0
        self._before = None
        self._measurements.collect()
        self._measurements.laps.clear()
        self._measurements.syncs.clear()
        self._is_listening = self.role.world_size > 1
        if self._is_listening:
            steps.add_fetch_listener(self._model, self._on_fetch)

    def begin_epoch(self) -> None:
        self._step_start_s = None

    def begin_step(self) -> float:
        """Returns the time by `time.perf_counter`."""
        if self._is_scheduled and self._before is None:
            self._before = int(self._model.optimizer.iterations.numpy())
        self._batch_start_s = now_s = time.perf_counter()
        if self._step_start_s is None and not self._is_first:
            self._step_start_s = now_s
        return now_s

    def end_step(self) -> float:
        """Call it after every batch. Returns the time by `time.perf_counter`."""
        now_s, traces = time.perf_counter(), self._measurements.traces
        steps: int = self._model.steps_per_execution
        if self._step_start_s is not None:
            self._steps_s.append(now_s - self._step_start_s)
        if self._is_first:  # the first step does not count, nor do its waiting times
            self._waits = _Waits()
            self._measurements.collect()
            self._measurements.syncs.clear()
            self._is_first = False
        elif not self._is_listening:
            is_traced = traces != self._traces
            if self._is_in_graph and steps == 1:
                self._starts.append(math.nan if is_traced else self._batch_start_s)
            elif not is_traced:
                self._note_wait()
        self._step_start_s, self._traces = now_s, traces
        self.seen += steps
        self._step += steps
        if self._is_in_graph:
            self._in_graph += steps
            if self._in_graph >= _MOST_IN_GRAPH:
                self._fetch_graph_times()
        return now_s

    def end_window(self) -> StepReport | None:
        """Ends the window and returns its report; None if it contains at most the first step."""
        if not self.seen or not self._steps_s:
            return None
        self._fetch_graph_times()
        laps = [self._measurements.laps.popleft() for _ in range(len(self._measurements.laps))]
        syncs = [self._measurements.syncs.popleft() for _ in range(len(self._measurements.syncs))]
        waits, self._waits = self._waits, _Waits()
        report = StepReport(
            self.role.rank,
            self.where,
            self.updates,
            self.seen,
            statistics.median(self._steps_s) / self._model.steps_per_execution,
            _make_replica_reports(laps, syncs),
            waits.mean_s,
            _memory_bytes(),
            input_total_s=waits.total_s,
            sync_total_s=_sync_total_s(syncs, len(self._steps_s) * self._model.steps_per_execution),
        )
        self._steps_s.clear()
        self.seen = 0
        return report

    def close(self) -> None:
        if self._is_listening:
            self._is_listening = False
            steps.remove_fetch_listener(self._model, self._on_fetch)

    # Internals

    def _on_fetch(self, seconds: float) -> None:
        self._waits.add(seconds)

    def _note_wait(self) -> None:
        """Notes the wait of a single process, which fetches data within the call of the step: the
        time until the first replica starts."""
        laps = self._measurements.laps
        here = min(self._replicas_here, len(laps))
        if self._model.steps_per_execution > 1 or not here:
            self._waits.is_known = False
            return
        start_s = min(laps[-place].start_s for place in range(1, here + 1))
        if start_s < self._batch_start_s:  # the lap is from an earlier step
            self._waits.is_known = False
        else:
            self._waits.add(start_s - self._batch_start_s)

    def _fetch_graph_times(self) -> None:
        """Adds the waits of steps whose times were recorded in the graph."""
        self._measurements.collect()
        self._in_graph = 0
        starts, self._starts = self._starts, []
        laps = list(self._measurements.laps)
        place = max(0, len(laps) - len(starts))
        while place and starts and laps[place - 1].start_s >= starts[0] - _SAME_S:
            place -= 1  # a callback ran additional steps
        if (waits_s := _match_in_order(starts, laps[place:])) is not None:
            self._waits.add(math.fsum(waits_s), len(waits_s))
            return
        for start_s, next_s in pairwise([*starts, math.inf]):
            while place < len(laps) and laps[place].start_s < start_s - _SAME_S:
                place += 1
            if math.isnan(start_s):
                continue
            if place == len(laps) or laps[place].start_s > next_s:
                self._waits.is_known = False  # the step's time is missing
                return
            self._waits.add(max(0.0, laps[place].start_s - start_s))
            place += 1


class _Waits:
    """The time that a worker has waited for its data."""

    def __init__(self) -> None:
        self._secs, self._count = 0.0, 0
        self.is_known = True

    def add(self, secs: float, count: int = 1) -> None:
        self._secs += secs
        self._count += count

    @property
    def total_s(self) -> float | None:
        return self._secs if self.is_known and self._count else None

    @property
    def mean_s(self) -> float | None:
        return self._secs / self._count if self.is_known and self._count else None


class StepWindows:
    """Makes a `StepReport` of every window of a `fit`, and collects those of all workers.

    Args:
        own: The windows of this worker.
        every_steps: The number of steps per window.
    """

    def __init__(self, own: OwnWindows, every_steps: int) -> None:
        self.own = own
        self._every_steps = every_steps
        self._reports: Reports | None = None

    def begin(
        self,
        topic: str,
        on_all: Callable[[list[StepReport]], None],
        on_lost: Callable[[AgreementError], None],
        completed: Callable[[StepReport], StepReport] = lambda report: report,
    ) -> Channel:
        """Starts measuring. Call it from `on_train_begin`, on all workers.

        Args:
            topic: A name that distinguishes these reports from others.
            on_all: Called on the chief with the reports of all workers, by rank; in a thread if
                there are several workers.
            on_lost: Called in a thread with the error if workers cannot reach each other any more.
            completed: Adds slow measurements to a report; runs in a thread if there are several
                workers.

        Returns:
            A channel to the other workers, not shared with any other training.
        """
        self.close()
        self._on_all = on_all
        self._completed = completed
        session = agreement.get_channel(self.own.role).session(topic)
        if self.own.role.world_size > 1:
            self._reports = Reports(session, lambda said: on_all([*map(from_text, said)]), on_lost)
        self.own.begin()
        return session

    def end_step(self) -> StepReport | None:
        """Call it after every batch. Returns this worker's report if a window is complete."""
        self.own.end_step()
        return self.end_epoch() if self.own.seen >= self._every_steps else None

    def end_epoch(self) -> StepReport | None:
        """Ends the window early and returns its report; None if it is empty."""
        report = self.own.end_window()
        if report is None:
            return None
        if self._reports is None:
            self._on_all([self._completed(report)])
        else:
            self._reports.send(lambda: as_text(self._completed(report)))
        return report

    def close(self, last_secs: float = 0.0) -> None:
        """Stops measuring, after waiting up to `last_secs` seconds for reports in progress."""
        if self._reports is not None:
            self._reports.close(last_secs)
            self._reports = None
        self.own.close()


def _match_in_order(starts_s: Sequence[float], laps: Sequence[Lap]) -> Sequence[float] | None:
    """Returns the time from every start to its lap. Returns None unless every start has exactly one
    lap, which is the usual case."""
    called_s, started_s = np.array(starts_s), np.array([lap.start_s for lap in laps])
    if len(called_s) != len(started_s) or np.isnan(called_s).any():
        return None
    follows_call = called_s - _SAME_S <= started_s
    precedes_next_call = started_s[:-1] <= called_s[1:]
    if not (follows_call.all() and precedes_next_call.all()):
        return None
    waits_s: list[float] = np.maximum(started_s - called_s, 0.0).tolist()
    return waits_s


def _sync_total_s(syncs: Sequence[Sync], steps: int) -> float | None:
    """Returns the total of the replica that waited least, extrapolated from the `syncs` received
    to all steps."""
    of_replica = defaultdict(list)
    for sync in syncs:
        of_replica[sync.replica].append(sync.sync_s)
    return min((steps * statistics.fmean(each) for each in of_replica.values()), default=None)


def _make_replica_reports(laps: Sequence[Lap], syncs: Sequence[Sync]) -> tuple[ReplicaReport, ...]:
    return tuple(
        _make_replica_report(
            replica,
            [lap for lap in laps if lap.replica == replica],
            [sync.sync_s for sync in syncs if sync.replica == replica],
        )
        for replica in sorted({lap.replica for lap in laps})
    )


def _make_replica_report(
    replica: int, laps: Sequence[Lap], syncs_s: Sequence[float]
) -> ReplicaReport:
    read = [lap.reading for lap in laps if lap.reading is not None]
    full = [each for each in read if each.samples]  # one without samples has no loss
    losses = [each.loss for each in full]
    return ReplicaReport(
        replica,
        statistics.median(lap.compute_s for lap in laps),
        statistics.median(syncs_s) if syncs_s else None,
        _mean([each.samples for each in read]),
        None if all(map(math.isnan, losses)) else _mean(losses),
        _mean([each.gradient_norm for each in full]),
        tuple(lap.fingerprint for lap in laps if lap.fingerprint is not None),
    )


def _mean(values: Sequence[float]) -> float | None:
    # `statistics.mean` uses exact fractions, which cannot represent NaN.
    return sum(values) / len(values) if values else None


def _memory_bytes() -> int | None:
    try:
        with open(_STATM, encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:  # not Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def failure_announcer(what: str) -> Callable[[AgreementError], None]:
    """Returns a thread-safe function that logs `what` and the error.

    It logs nothing about a lost worker, for which `fit` raises an error.
    """

    def announce_failure(error: AgreementError) -> None:
        if not isinstance(error.__cause__, ConnectionError):
            announce(f"{what}: {error}")

    return announce_failure
