from __future__ import annotations

import signal
from collections.abc import Mapping
from math import inf, nan

import pytest

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.supervised import Phase, Status
from keras_distplug.supervisor.attempt import Limits, Outcome
from keras_distplug.supervisor.exits import Cause, Exit, earliest_first, judge
from keras_distplug.supervisor.group import Ended
from keras_distplug.supervisor.restarts import Attempt, Budgets, End, decide
from keras_distplug.supervisor.run import closing_report, recovery_report


def status(since: Mapping[Phase, float]) -> Status:
    return Status(phase=list(since)[-1], since=since)


DONE = status({Phase.JOINED: 1.0, Phase.COMPLETED: 2.0})
JOINED = status({Phase.JOINED: 1.0})
FITTING = status({Phase.JOINED: 1.0, Phase.FITTING: 1.5})
EXITED_FOR_A_PEER = "w exited because it lost another worker (exit code 201)"
REFUSED = Status(Phase.REFUSED, {Phase.REFUSED: 2.0}, why="DataError: `x` holds no samples.")
NOT_AGAIN = "w asked not to be restarted (exit code 93)"
PREEMPTED = status({Phase.JOINED: 1.0, Phase.PREEMPTED: 2.0})


@pytest.mark.parametrize(
    ("returncode", "report", "cause", "exit_code", "text"),
    [
        (0, DONE, Cause.COMPLETED, 0, "w completed training"),
        (0, FITTING, Cause.LEFT, 1, "w exited without completing training (exit code 0)"),
        (0, JOINED, Cause.UNTRAINED, 0, "w exited with code 0 without training"),
        (0, None, Cause.UNTRAINED, 0, "w exited with code 0 without training"),
        (3, JOINED, Cause.FAILED, 3, "w exited with code 3"),
        (3, DONE, Cause.FAILED, 3, "w exited with code 3"),
        (143, PREEMPTED, Cause.PREEMPTED, 143, "w was preempted after saving a checkpoint"),
        (-9, PREEMPTED, Cause.PREEMPTED, 137, "w was preempted after saving a checkpoint"),
        (1, PREEMPTED, Cause.FAILED, 1, "w exited with code 1"),
        (143, JOINED, Cause.FAILED, 143, "w exited with code 143"),
        (201, JOINED, Cause.FAILED, 201, EXITED_FOR_A_PEER),
        (93, JOINED, Cause.FAILED, 93, NOT_AGAIN),
        (93, REFUSED, Cause.FAILED, 93, f"{NOT_AGAIN}: DataError: `x` holds no samples."),
        (1, REFUSED, Cause.FAILED, 1, "w exited with code 1"),
        (200, JOINED, Cause.FAILED, 200, "w exited with code 200"),
        (-9, DONE, Cause.FAILED, 137, "w was killed by SIGKILL"),
        (-11, None, Cause.FAILED, 139, "w was killed by SIGSEGV"),
        (-40, None, Cause.FAILED, 168, "w was killed by signal 40"),
    ],
)
def test_judge(
    returncode: int, report: Status | None, cause: Cause, exit_code: int, text: str
) -> None:
    """Only exit code 0 after completed training, or without any training, is not a failure."""
    judged = judge(Ended("w", returncode, 5.0), report)
    assert (judged.cause, judged.exit_code, str(judged)) == (cause, exit_code, text)


def test_late_worker() -> None:
    """A worker that did not join has the exit code of a timeout."""
    late = Exit("w", Cause.LATE, None, 5.0, limit_secs=300)
    assert str(late) == "w has not joined the cluster within 300 s (--startup-timeout)"
    assert late.exit_code == 124


def test_silent_worker() -> None:
    """A silent worker has the same code, and its process state is reported."""
    silent = Exit("w", Cause.SILENT, None, 5.0, limit_secs=300, why="T (stopped)")
    assert str(silent) == (
        "w has given no sign of life for 300 s; process state T (stopped) (--unresponsive-timeout)"
    )
    assert silent.exit_code == 124


@pytest.mark.parametrize("name", ["startup_secs", "grace_secs", "silence_secs"])
@pytest.mark.parametrize("value", [-1.0, inf, nan])
def test_impossible_limits(name: str, value: float) -> None:
    """An impossible time limit is refused."""
    with pytest.raises(ConfigurationError, match="must be"):
        Limits(**{name: value})


def test_earliest_first() -> None:
    """The cause of simultaneous exits is one by a signal; an abort may be due to a lost peer."""
    crash, abort, killed = (Exit("w", Cause.FAILED, code, 5.0) for code in (1, -6, -9))
    assert min([crash, abort, killed], key=earliest_first) is killed
    assert min([killed, crash, abort], key=earliest_first) is killed
    sooner = Exit("w", Cause.FAILED, 1, 4.9)
    assert min([killed, sooner], key=earliest_first) is sooner
    lost_a_peer = Exit("w", Cause.FAILED, 201, 4.8)
    assert min([lost_a_peer, crash], key=earliest_first) is crash


DEAD = Exit("worker-1", Cause.FAILED, -9, 100.0)
PEER = Exit("worker-0", Cause.STOPPED, -15, 101.0)


def test_recovery_report() -> None:
    """The recovery time is broken down by the times at which the last worker reached every
    phase."""
    reports = {
        "worker-0": status({Phase.JOINED: 104.0, Phase.FITTING: 106.5, Phase.TRAINING: 107.0}),
        "worker-1": status({Phase.JOINED: 105.0, Phase.FITTING: 106.0, Phase.TRAINING: 107.2}),
    }
    assert recovery_report(Outcome((DEAD, PEER), None, 101.0), reports) == (
        "training again 7.2 s after worker-1 was killed by SIGKILL: stop 1.0 s, "
        "import and join 4.0 s, build and restore 1.5 s, first step 0.7 s"
    )


def test_recovery_report_without_a_phase() -> None:
    """The time of a phase that no worker reports counts towards the next one."""
    reports = {"worker-0": status({Phase.JOINED: 105.0, Phase.TRAINING: 107.0})}
    assert recovery_report(Outcome((DEAD, PEER), None, 101.0), reports).endswith(
        "import and join 4.0 s, first step 2.0 s"
    )


def test_closing_report_of_a_failure() -> None:
    """The report starts with the earliest failure; the others follow as its consequences."""
    before = Outcome((Exit("worker-0", Cause.LEFT, 0, 50.0),), None, 51.0)
    crash = Exit("worker-2", Cause.FAILED, 1, 100.5)
    history = [
        Attempt((0, 1, 2), outcome, {})
        for outcome in (before, Outcome((DEAD, crash, PEER), None, 101.0))
    ]
    end = decide(history, Budgets(failures=1))
    assert isinstance(end, End)
    lines = closing_report(history, end, 60.0)
    assert lines[0] == "gave up after 1 restart; exit code 137"
    assert lines[1].startswith("first failure: worker-1 was killed by SIGKILL at ")
    assert lines[2:4] == [
        "  then: worker-2 exited with code 1, 0.5 s later",
        "  then: worker-0 was stopped by the supervisor (SIGTERM), 1.0 s later",
    ]
    assert lines[4].startswith("  earlier: worker-0 exited without completing")


def test_closing_report_of_an_interruption() -> None:
    """After a signal to the supervisor, the report describes how every worker exited."""
    history = [Attempt((0,), Outcome((PEER,), signal.SIGINT, 101.0), {})]
    end = decide(history, Budgets())
    assert end == End(130, "stopped by SIGINT to the supervisor")
    assert closing_report(history, end, 1.0) == [
        "stopped by SIGINT to the supervisor: worker-0 was stopped by the supervisor (SIGTERM)"
    ]
