"""Windows of steps, seen by all workers and brought together on the chief."""

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
_AT_ONCE = 1024  # steps, of `noted_times.KEPT`
_SAME_S = 0.001  # by two clocks


class OwnWindows:
    """Makes a `StepReport` of each window of steps of this worker.

    Args:
        model: One that `fit` is about to train: this is to be made in a callback's `set_model`,
            because Keras makes the step before `on_train_begin`.
        syncs: Whether it is wanted how long each replica waits for the sum of gradients.
        readings: Whether losses and gradients are.
        fingerprints: Whether those of the data are.
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
        self._heard = listen(model, syncs=syncs, readings=readings, fingerprints=fingerprints)
        self.role: Role = agreement.role_under(model.distribute_strategy)
        self.where = f"{self.role.name} on {socket.gethostname()}"
        self.seen = 0  # steps of this window
        self._step = 0
        self._before: int | None = None
        self._is_scheduled = is_scheduled(model.distribute_strategy)
        self._hears = False

    @property
    def updates(self) -> int:
        """As the optimizer counts them, which goes on where a checkpoint was taken up.

        Where another process has that count, those that were scheduled: it is asked once, because
        that takes as long as a small step, and it may be gone.
        """
        optimizer = self._model.optimizer
        if optimizer is None:
            return self._step
        if not self._is_scheduled:
            return int(optimizer.iterations.numpy())
        return (self._before or 0) + self._step

    def unwant(self) -> None:
        """To be called where it was not `fit` that called `set_model`."""
        StepInstrumentation.of(self._model).use_none()

    def begin(self) -> None:
        """To be called from `on_train_begin`."""
        self.close()
        self._steps_s: list[float] = []
        self._waits = _Waits()
        self._begins: list[float] = []  # start times of steps not yet matched with the graph's
        self._in_graph = 0  # number of steps since then
        self._replicas_here = replicas_here(self._model.distribute_strategy)
        self._traces = self._heard.traces
        self._begins_s = 0.0
        self._is_in_graph = self._stopwatch.is_in_graph
        self._begun_s: float | None = None  # not of the very first step, which is traced
        self._is_first = True
        self.seen = self._step = 0
        self._before = None
        self._heard.collect()
        self._heard.laps.clear()
        self._heard.syncs.clear()
        self._hears = self.role.world_size > 1
        if self._hears:
            steps.hear_of_fetches(self._model, self._on_fetch)

    def begin_epoch(self) -> None:
        self._begun_s = None

    def begin_step(self) -> None:
        if self._is_scheduled and self._before is None:
            self._before = int(self._model.optimizer.iterations.numpy())
        now_s = time.perf_counter()
        self._begins_s = now_s
        if self._begun_s is None and not self._is_first:
            self._begun_s = now_s

    def end_step(self) -> None:
        """To be called behind each batch of Keras'."""
        now_s = time.perf_counter()
        if self._begun_s is not None:
            self._steps_s.append(now_s - self._begun_s)
        if self._is_first:  # what was waited for in it was not waited for in a step that counts
            self._waits = _Waits()
            self._heard.collect()
            self._heard.syncs.clear()
        elif not self._hears:
            self._note_wait()
        self._begun_s, self._is_first, self._traces = now_s, False, self._heard.traces
        steps: int = self._model.steps_per_execution
        self.seen += steps
        self._step += steps
        if self._is_in_graph:
            self._in_graph += steps
            if self._in_graph >= _AT_ONCE:
                self._look_at_graph()

    def end_window(self) -> StepReport | None:
        """What there is by now; None if there was nothing but a first step."""
        if not self.seen or not self._steps_s:
            return None
        self._look_at_graph()
        laps = [self._heard.laps.popleft() for _ in range(len(self._heard.laps))]
        syncs = [self._heard.syncs.popleft() for _ in range(len(self._heard.syncs))]
        waits, self._waits = self._waits, _Waits()
        report = StepReport(
            self.role.rank,
            self.where,
            self.updates,
            self.seen,
            statistics.median(self._steps_s) / self._model.steps_per_execution,
            _of_replicas(laps, syncs),
            waits.mean_s,
            _memory_bytes(),
            input_total_s=waits.total_s,
            sync_total_s=_sync_total_s(syncs, len(self._steps_s) * self._model.steps_per_execution),
        )
        self._steps_s.clear()
        self.seen = 0
        return report

    def close(self) -> None:
        if self._hears:
            self._hears = False
            steps.hear_no_more_of_fetches(self._model, self._on_fetch)

    # How

    def _on_fetch(self, seconds: float) -> None:
        self._waits.add(seconds)

    def _note_wait(self) -> None:
        """In one process data are fetched within the call: up to the first replica's begin."""
        is_traced = self._heard.traces != self._traces
        if self._is_in_graph and self._model.steps_per_execution == 1:
            self._begins.append(math.nan if is_traced else self._begins_s)
            return
        if is_traced:
            return
        laps = self._heard.laps
        here = min(self._replicas_here, len(laps))
        if self._model.steps_per_execution > 1 or not here:
            self._waits.is_known = False
            return
        begun_s = min(laps[-place].begun_s for place in range(1, here + 1))
        if begun_s < self._begins_s:  # it is not of this step
            self._waits.is_known = False
        else:
            self._waits.add(begun_s - self._begins_s)

    def _look_at_graph(self) -> None:
        """Adds the waits of steps whose times were recorded in the graph."""
        self._heard.collect()
        self._in_graph = 0
        begins, self._begins = self._begins, []
        laps = list(self._heard.laps)
        place = max(0, len(laps) - len(begins))
        while place and begins and laps[place - 1].begun_s >= begins[0] - _SAME_S:
            place -= 1  # a callback ran additional steps
        for begin_s, next_s in pairwise([*begins, math.inf]):
            while place < len(laps) and laps[place].begun_s < begin_s - _SAME_S:
                place += 1
            if math.isnan(begin_s):
                continue
            if place == len(laps) or laps[place].begun_s > next_s:
                self._waits.is_known = False  # its time is lost
                return
            self._waits.add(max(0.0, laps[place].begun_s - begin_s))
            place += 1


class _Waits:
    """How long a worker has waited for its data."""

    def __init__(self) -> None:
        self._secs, self._count = 0.0, 0
        self.is_known = True

    def add(self, secs: float) -> None:
        self._secs += secs
        self._count += 1

    @property
    def total_s(self) -> float | None:
        return self._secs if self.is_known and self._count else None

    @property
    def mean_s(self) -> float | None:
        return self._secs / self._count if self.is_known and self._count else None


class StepWindows:
    """Makes a `StepReport` of each window of a `fit`, and brings those of all workers together.

    Args:
        own: Of this worker.
        every_steps: How many steps are a window.
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
        """To be called from `on_train_begin`, on all workers.

        Args:
            topic: What tells the reports from others.
            on_all: Called on the chief with those of all workers, by rank; from a thread where
                there are several.
            on_lost: Called, from a thread, with what keeps workers from hearing each other.
            completed: Adds what takes time, from a thread where there are several workers.

        Returns:
            A channel to the other workers, which is no other training's.
        """
        self.close()
        self._on_all = on_all
        self._completed = completed
        session = agreement.among(self.own.role).session(topic)
        if self.own.role.world_size > 1:
            self._reports = Reports(session, lambda said: on_all([*map(from_text, said)]), on_lost)
        self.own.begin()
        return session

    def end_step(self) -> StepReport | None:
        """To be called behind each batch of Keras'. This worker's report, if a window is over."""
        self.own.end_step()
        return self.end_epoch() if self.own.seen >= self._every_steps else None

    def end_epoch(self) -> StepReport | None:
        """The report of what remains."""
        report = self.own.end_window()
        if report is None:
            return None
        if self._reports is None:
            self._on_all([self._completed(report)])
        else:
            self._reports.send(lambda: as_text(self._completed(report)))
        return report

    def close(self, last_secs: float = 0.0) -> None:
        """Waits for so long for reports that are under way."""
        if self._reports is not None:
            self._reports.close(last_secs)
            self._reports = None
        self.own.close()


def _sync_total_s(syncs: Sequence[Sync], steps: int) -> float | None:
    """Of the replica that waited least. The last ones that were heard stand for all steps."""
    of_replica = defaultdict(list)
    for sync in syncs:
        of_replica[sync.replica].append(sync.sync_s)
    return min((steps * statistics.fmean(each) for each in of_replica.values()), default=None)


def _of_replicas(laps: Sequence[Lap], syncs: Sequence[Sync]) -> tuple[ReplicaReport, ...]:
    return tuple(
        _of_replica(
            replica,
            [lap for lap in laps if lap.replica == replica],
            [sync.sync_s for sync in syncs if sync.replica == replica],
        )
        for replica in sorted({lap.replica for lap in laps})
    )


def _of_replica(replica: int, laps: Sequence[Lap], syncs_s: Sequence[float]) -> ReplicaReport:
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
    # `statistics.mean` takes exact fractions, which NaN is none of.
    return sum(values) / len(values) if values else None


def _memory_bytes() -> int | None:
    try:
        with open(_STATM, encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:  # not Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def tell_what_is_lost(what: str) -> Callable[[AgreementError], None]:
    """What says, from a thread, that `what` has ended; a lost worker ends `fit`, which tells."""

    def tell(error: AgreementError) -> None:
        if not isinstance(error.__cause__, ConnectionError):
            announce(f"{what}: {error}")

    return tell
