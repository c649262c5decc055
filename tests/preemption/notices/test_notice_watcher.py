"""Polling for notices during training."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from mock_metadata import Mock, drip, raw, reply, silence
from support.cluster import environment

from keras_distplug.core.errors import MetadataError
from keras_distplug.preemption.notices.aws import AwsNotices
from keras_distplug.preemption.notices.notice import Notice
from keras_distplug.preemption.notices.watcher import Watcher

pytestmark = pytest.mark.timeout(60)
SOFT = Notice("AWS", "rebalance recommendation", None, False)
FINAL = Notice("AWS", "spot instance-action terminate", 1505722920.0, True)
SOON = 0.001
Logged = Callable[[], list[str]]


def script(*outcomes: Notice | Exception | None) -> Callable[[], Notice | None]:
    """Returns a poll with these outcomes, and then an error that fails the test."""
    left = list(outcomes)

    def poll() -> Notice | None:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return poll


def watched(poll: Callable[[], Notice | None]) -> list[Notice]:
    """Returns the notices reported until the watcher stops on its own."""
    reported: list[Notice] = []
    watcher = Watcher(poll, reported.append, every_secs=SOON)
    watcher._thread.join(30)
    assert not watcher._thread.is_alive()
    watcher.close()
    return reported


def test_reported_once(logged: Logged) -> None:
    """A notice is reported when it appears, and polling stops after a final one."""
    assert watched(script(None, None, FINAL)) == [FINAL]
    assert not logged()


def test_recommendation_becomes_final() -> None:
    """A repeated recommendation is reported once, and so is the final notice after it."""
    assert watched(script(SOFT, SOFT, None, SOFT, FINAL)) == [SOFT, FINAL]


def test_failure_is_logged_once(logged: Logged) -> None:
    """A failure of the server is logged once, and so is its recovery."""
    down = MetadataError("no answer of 1.2.3.4"), MetadataError("status 500")
    assert watched(script(*down, None, None, *down, FINAL)) == [FINAL]
    cannot = "preemption notices cannot be read; retrying every 0.001 s: "
    again = "preemption notices can be read again"
    assert logged() == [f"{cannot}no answer of 1.2.3.4", again] * 2


def test_bug_in_a_poll(logged: Logged) -> None:
    """An unexpected error is logged with its type, even during a failure, and polling continues."""
    bug = AttributeError("no such thing")
    assert watched(script(MetadataError("down"), bug, bug, FINAL)) == [FINAL]
    down, unexpected, again = logged()
    assert down.endswith("s: down")
    assert unexpected.endswith("an unexpected error: AttributeError('no such thing')")
    assert again.endswith("can be read again")


def test_bug_in_report(logged: Logged) -> None:
    """An error in `report` is logged with its type and the notice; the next notice is reported."""
    reported: list[Notice] = []

    def report(notice: Notice) -> None:
        reported.append(notice)
        raise KeyError("forgotten")

    watcher = Watcher(script(SOFT, SOFT, FINAL), report, every_secs=SOON)
    watcher._thread.join(30)
    assert reported == [SOFT, FINAL]
    assert [m.count("for it: KeyError('forgotten')") for m in logged()] == [1, 1]
    assert "rebalance recommendation" in logged()[0]


def test_close_between_polls() -> None:
    """`close` stops the watcher immediately, an hour before the next poll, and may be repeated."""
    has_polled = threading.Event()
    watcher = Watcher(lambda: has_polled.set(), lambda _: None, every_secs=3600)
    assert has_polled.wait(30)
    watcher.close()
    watcher.close()
    watcher._thread.join(30)
    assert not watcher._thread.is_alive()


@pytest.mark.parametrize(
    ("before", "late"),
    [(None, FINAL), (None, MetadataError("down")), (MetadataError("down"), None)],
    ids=["notice", "trouble", "recovery"],
)
def test_close_during_a_poll(
    before: MetadataError | None, late: Notice | MetadataError | None, logged: Logged
) -> None:
    """`close` does not wait for a hanging poll, whose outcome is neither reported nor logged."""
    has_started, may_end = threading.Event(), threading.Event()
    reported: list[Notice] = []
    outcomes = script(before, late)
    polls = iter((False, True))

    def poll() -> Notice | None:
        if next(polls):
            has_started.set()
            assert may_end.wait(30)
        return outcomes()

    watcher = Watcher(poll, reported.append, every_secs=SOON)
    assert has_started.wait(30)
    logged_before = list(logged())
    watcher.close()
    assert watcher._thread.is_alive()
    may_end.set()
    watcher._thread.join(30)
    assert not watcher._thread.is_alive()
    assert reported == []
    assert logged() == logged_before
    assert len(logged_before) == (before is not None)


def test_close_in_report() -> None:
    """`report` may close the watcher."""
    closed: queue.SimpleQueue[Watcher] = queue.SimpleQueue()
    polls = iter(range(2))
    made = threading.Event()

    def report(_: Notice) -> None:
        assert made.wait(30)
        watcher.close()
        closed.put(watcher)

    def poll() -> Notice:
        next(polls)
        return SOFT

    watcher = Watcher(poll, report, every_secs=SOON)
    made.set()
    closed.get(timeout=30)._thread.join(30)
    assert not watcher._thread.is_alive()
    assert next(polls) == 1


def test_unreliable_server(mock: Mock, logged: Logged) -> None:
    """No notice is lost if a server is slow, broken, forgetful and unreadable in turn."""
    mock.answers["PUT /latest/api/token"] = [
        silence,
        reply("gone", status=500),
        *[reply(f"token-{number}") for number in range(9)],
    ]
    mock.answers["GET /latest/meta-data/spot/instance-action"] = [
        reply(status=401),
        reply(status=404),
        drip(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"),
        raw(b"garbage"),
        reply("<html>"),
        reply("[]"),
        reply('{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'),
    ]
    rebalance = "GET /latest/meta-data/events/recommendations/rebalance"
    mock.answers[rebalance] = [reply('{"noticeTime": "2017-09-18T08:20:00Z"}')]
    assert watched(AwsNotices(mock.base_url, timeout_s=1).poll) == [SOFT, FINAL]
    assert [len(mock.answers[place]) for place in mock.answers] == [7, 1, 1]
    assert mock.dripped > 3
    assert ["cannot" in message for message in logged()] == [True, False, True, False]


def test_close_during_a_request(mock: Mock) -> None:
    """A hanging request to a real server does not delay `close`."""
    mock.answers["PUT /latest/api/token"] = [silence]
    watcher = Watcher(AwsNotices(mock.base_url, timeout_s=0.5).poll, lambda _: None)
    assert mock.is_asked.wait(30)
    watcher.close()
    assert not mock.may_end.is_set()
    watcher._thread.join(30)
    assert not watcher._thread.is_alive()


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_process_exit_during_a_poll() -> None:
    """A hanging poll does not delay the exit of the process."""
    done = run(
        "import threading\n"
        "from keras_distplug.preemption.notices.watcher import Watcher\n"
        "started = threading.Event()\n"
        "Watcher(lambda: started.set() or threading.Event().wait(), print)\n"
        "assert started.wait(30)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_failure_during_process_exit() -> None:
    """A poll that fails because the process exits logs nothing."""
    done = run(
        "import atexit, threading\n"
        "from keras_distplug.preemption.notices.watcher import Watcher\n"
        "started, ending = threading.Event(), threading.Event()\n"
        "def poll():\n"
        "    started.set()\n"
        "    ending.wait()\n"
        "    raise RuntimeError('the interpreter ends')\n"
        "def end():\n"
        "    ending.set()\n"
        "    watcher._thread.join(30)\n"
        "    print(watcher._thread.is_alive())\n"
        "atexit.register(end)\n"  # called after functions that are registered later
        "watcher = Watcher(poll, print)\n"
        "assert started.wait(30)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
