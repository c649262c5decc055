"""Finds the worker that the others wait for.

In synchronous training, all workers stop when one does, and from outside they look alike. So all of
them are asked for their progress and their stacks. They wait for the one with the least progress,
or the one that cannot answer.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from keras_distplug.cluster.channel import Channel
from keras_distplug.cluster.listeners import Mailbox
from keras_distplug.core.errors import AgreementError
from keras_distplug.core.threads import within

_THREAD = "keras_distplug-letters"
_ANSWER_S = 1.5  # enough for any worker whose Python runs
_LOOK_AGAIN_S = 10.0


@dataclass(frozen=True)
class Report:
    """A worker's report of its progress.

    Args:
        moments: The number of times that its training has made progress since the start.
        doing: Its activity, such as "waits for its input in batch 7 of epoch 2".
        awaits: Whether it waits for its input or for other workers; None if not known.
        for_s: The time in seconds since its last progress.
        limit_s: The limit for that time, in seconds.
        silence_s: The time in seconds to wait for a worker that does not answer, whose stage is not
            known.
    """

    moments: int
    doing: str
    awaits: Literal["input", "others"] | None
    for_s: float
    limit_s: float
    silence_s: float

    @property
    def is_overdue(self) -> bool:
        return self.for_s >= self.limit_s

    def __str__(self) -> str:
        return f"{self.doing}, for {self.for_s:.1f} s"


@dataclass(frozen=True)
class Verdict:
    """The result of an inquiry.

    Args:
        hang: A description of the hang; None if the worker that the others wait for is still within
            its limit.
        look_again_s: The time in seconds until the next inquiry in that case. Defaults to 0.
    """

    hang: str | None
    look_again_s: float = 0.0


def judge(
    reports: Mapping[str, Report | None], silent_for_s: Mapping[str, float] | None = None
) -> Verdict:
    """Decides which worker the others wait for, and whether it has exceeded its limit.

    Args:
        reports: The reports by worker; None for a worker that has not answered.
        silent_for_s: The seconds since the last answer, by worker. A missing worker has never
            answered. Defaults to `None`: none has.
    """
    silent = [worker for worker, report in reports.items() if report is None]
    answered = {worker: report for worker, report in reports.items() if report is not None}
    if silent:
        # A single answer may be late, because of a busy machine or C code that blocks Python for a
        # while.
        remaining_s = {
            worker: min(
                report.silence_s - min(report.for_s, (silent_for_s or {}).get(worker, math.inf))
                for report in answered.values()
            )
            for worker in silent
        }
        overdue = [worker for worker in silent if remaining_s[worker] <= 0]
        if not overdue:
            return Verdict(None, min(*remaining_s.values(), _LOOK_AGAIN_S))
        return Verdict(
            f"{' and '.join(overdue)} did not answer: suspended (SIGSTOP), blocked in C code that "
            "keeps Python from running, or no longer in `fit`"
        )
    least = min(report.moments for report in answered.values())
    last = {worker: report for worker, report in answered.items() if report.moments == least}
    waited_for = _only(last, "input") or _only(last, None) or last
    are_overdue = [report.is_overdue for report in waited_for.values()]
    # If all are at the same point, any of them may be the one that still works.
    are_equal = len(waited_for) == len(answered)
    if not (all(are_overdue) if are_equal else any(are_overdue)):
        left = [report.limit_s - report.for_s for report in waited_for.values()]
        left_s = max(left) if are_equal else min(left)
        return Verdict(None, min(max(left_s, 0.0), _LOOK_AGAIN_S))
    description = "; ".join(f"{worker} {report}" for worker, report in waited_for.items())
    if are_equal and len(answered) > 1 and not _only(answered, "input"):
        description += ". No worker is behind the others: check that all call the same collectives."
    return Verdict(description)


class Inquiry:
    """An inquiry into the progress of workers; this one is for a single process."""

    def __init__(self, worker: str, report: Callable[[], Report]) -> None:
        self._worker = worker
        self._report = report

    def ask(self) -> Verdict:
        """Asks all workers. Takes a few seconds at most."""
        return judge({self._worker: self._report()})

    def report_hang(self, hang: str) -> None:
        """Makes all workers that can receive messages end because of this hang."""

    def leave(self) -> None:
        """Waits for a short time if others cannot exit in order without this worker."""

    def close(self) -> None:
        return


class ClusterInquiry(Inquiry):
    """An inquiry into the progress of all workers of a cluster.

    Args:
        channel: This session's channel to the other workers.
        report: Returns this worker's report. Called from any thread.
        on_hang: Called in a thread with the description of a hang that another worker has found.
    """

    def __init__(
        self, channel: Channel, report: Callable[[], Report], on_hang: Callable[[str], None]
    ) -> None:
        super().__init__(channel.role.name, report)
        self._role = channel.role
        self._channel = channel
        self._on_hang = on_hang
        self._silent: list[str] = []
        self._heard_s: dict[str, float] = {}
        self._rounds = itertools.count()
        # Errors are ignored: a lost worker ends this training anyway.
        self._mailbox = Mailbox(channel, self._on_message, lambda error: None)

    def ask(self) -> Verdict:
        round_ = f"{self._role.rank}-{next(self._rounds)}"
        try:
            self._send({"ask": round_})
            end_s = time.monotonic() + _ANSWER_S
            answers: list[Report | None] = [
                self._report()
                if rank == self._role.rank
                else self._answer(round_, rank, max(end_s - time.monotonic(), 0.1))
                for rank in range(self._role.world_size)
            ]
            heard_s = time.monotonic()
            self._heard_s |= {
                worker: heard_s
                for worker, answer in zip(self._role.workers, answers, strict=True)
                if answer is not None
            }
        except TimeoutError:  # from the chief, which stores the messages
            answers = [None] + [self._report()] * (self._role.world_size - 1)
        except AgreementError as error:
            report = self._report()
            found = f"{self._role.name} {report}; the other workers cannot be asked: {error}"
            return Verdict(found if report.is_overdue else None, _LOOK_AGAIN_S)
        reports = dict(zip(self._role.workers, answers, strict=True))
        self._silent = [worker for worker, report in reports.items() if report is None]
        now_s = time.monotonic()
        return judge(reports, {each: now_s - at_s for each, at_s in self._heard_s.items()})

    def report_hang(self, hang: str) -> None:
        if not self._is_chief_reachable():
            return
        try:
            self._send({"hang": hang, "silent": self._silent})
        except (TimeoutError, AgreementError):
            return  # the others will find the hang on their own

    def leave(self) -> None:
        # The others receive messages through the chief, so the chief must exit last.
        if not self._is_chief_reachable():
            return
        try:
            within(
                _ANSWER_S, lambda: self._channel.send_once(f"left/{self._role.rank}", ""), _THREAD
            )
            if self._role.is_chief:
                end_s = time.monotonic() + _ANSWER_S
                for rank, name in enumerate(self._role.workers):
                    if name not in self._silent:
                        self._channel.receive(f"left/{rank}", max(end_s - time.monotonic(), 0.1))
        except (TimeoutError, AgreementError):
            return

    def close(self) -> None:
        self._mailbox.close()

    def _on_message(self, letter: str) -> None:
        said = json.loads(letter)
        if "hang" in said:
            self._silent = said["silent"]
            self._on_hang(said["hang"])
            return
        topic = f"report/{said['ask']}/{self._role.rank}"
        try:
            self._channel.send_once(topic, json.dumps(asdict(self._report())))
        except AgreementError:
            return  # the other worker treats this as no answer

    def _answer(self, round_: str, rank: int, timeout_s: float) -> Report | None:
        try:
            answer = self._channel.receive(f"report/{round_}/{rank}", timeout_s)
        except AgreementError as error:
            if isinstance(error.__cause__, TimeoutError):
                return None
            raise
        return Report(**json.loads(answer))

    def _is_chief_reachable(self) -> bool:
        return self._role.workers[0] not in self._silent

    def _send(self, letter: Mapping[str, object]) -> None:
        # Needs a timeout: TensorFlow waits forever for a frozen chief.
        within(_ANSWER_S, lambda: self._mailbox.send(json.dumps(letter)), _THREAD)


def _only(reports: Mapping[str, Report], awaits: str | None) -> dict[str, Report]:
    return {worker: report for worker, report in reports.items() if report.awaits == awaits}
