"""Polling beside training."""

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
Said = Callable[[], list[str]]


def script(*outcomes: Notice | Exception | None) -> Callable[[], Notice | None]:
    """Polls with these outcomes, then an error that fails the test that sees it."""
    left = list(outcomes)

    def poll() -> Notice | None:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return poll


def watched(poll: Callable[[], Notice | None]) -> list[Notice]:
    """What is told until the watch ends by itself."""
    told: list[Notice] = []
    watcher = Watcher(poll, told.append, every_secs=SOON)
    watcher._thread.join(30)
    assert not watcher._thread.is_alive()
    watcher.close()
    return told


def test_told_once(said: Said) -> None:
    """A notice is told when it is there, and polling ends with a final one."""
    assert watched(script(None, None, FINAL)) == [FINAL]
    assert not said()


def test_recommendation_becomes_final() -> None:
    """A recommendation is told once, however often it is read, and the final notice after it."""
    assert watched(script(SOFT, SOFT, None, SOFT, FINAL)) == [SOFT, FINAL]


def test_trouble_is_said_once(said: Said) -> None:
    """The log says once that the server does not answer properly, and once that it does again."""
    down = MetadataError("no answer of 1.2.3.4"), MetadataError("status 500")
    assert watched(script(*down, None, None, *down, FINAL)) == [FINAL]
    cannot = "notices of preemption cannot be read, and are asked for again every 0.001 s: "
    again = "notices of preemption can be read again"
    assert said() == [f"{cannot}no answer of 1.2.3.4", again] * 2


def test_bug_in_a_poll(said: Said) -> None:
    """What nobody expected is said with its type, even amid other trouble, and polling goes on."""
    bug = AttributeError("no such thing")
    assert watched(script(MetadataError("down"), bug, bug, FINAL)) == [FINAL]
    down, unexpected, again = said()
    assert down.endswith("s: down")
    assert unexpected.endswith("a bug: AttributeError('no such thing')")
    assert again.endswith("can be read again")


def test_bug_in_tell(said: Said) -> None:
    """What fails in telling is said with its type and with the notice; the next one is told."""
    told: list[Notice] = []

    def tell(notice: Notice) -> None:
        told.append(notice)
        raise KeyError("forgotten")

    watcher = Watcher(script(SOFT, SOFT, FINAL), tell, every_secs=SOON)
    watcher._thread.join(30)
    assert told == [SOFT, FINAL]
    assert [m.count("failed: KeyError('forgotten')") for m in said()] == [1, 1]
    assert "rebalance recommendation" in said()[0]


def test_close_between_polls() -> None:
    """`close` ends the watch at once, though the next poll is an hour away. Twice is no error."""
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
    before: MetadataError | None, late: Notice | MetadataError | None, said: Said
) -> None:
    """`close` does not wait for a poll that hangs, and what comes of it is neither told nor
    said."""
    has_begun, may_end = threading.Event(), threading.Event()
    told: list[Notice] = []
    outcomes = script(before, late)
    polls = iter((False, True))

    def poll() -> Notice | None:
        if next(polls):
            has_begun.set()
            assert may_end.wait(30)
        return outcomes()

    watcher = Watcher(poll, told.append, every_secs=SOON)
    assert has_begun.wait(30)
    said_before = list(said())
    watcher.close()
    assert watcher._thread.is_alive()
    may_end.set()
    watcher._thread.join(30)
    assert not watcher._thread.is_alive()
    assert told == []
    assert said() == said_before
    assert len(said_before) == (before is not None)


def test_close_in_tell() -> None:
    """Who is told may close."""
    closed: queue.SimpleQueue[Watcher] = queue.SimpleQueue()
    polls = iter(range(2))
    made = threading.Event()

    def tell(_: Notice) -> None:
        assert made.wait(30)
        watcher.close()
        closed.put(watcher)

    def poll() -> Notice:
        next(polls)
        return SOFT

    watcher = Watcher(poll, tell, every_secs=SOON)
    made.set()
    closed.get(timeout=30)._thread.join(30)
    assert not watcher._thread.is_alive()
    assert next(polls) == 1


def test_server_in_all_its_moods(mock: Mock, said: Said) -> None:
    """A real server that is slow, broken, forgetful and unreadable in turns costs no notice."""
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
    assert ["cannot" in message for message in said()] == [True, False, True, False]


def test_close_during_a_request(mock: Mock) -> None:
    """A request that hangs at a real server does not keep `close`."""
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


def test_end_of_the_process_during_a_poll() -> None:
    """A poll that hangs keeps no process, and is not waited for."""
    done = run(
        "import threading\n"
        "from keras_distplug.preemption.notices.watcher import Watcher\n"
        "begun = threading.Event()\n"
        "Watcher(lambda: begun.set() or threading.Event().wait(), print)\n"
        "assert begun.wait(30)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_trouble_at_the_end_of_the_process() -> None:
    """A poll that fails because the process ends says nothing."""
    done = run(
        "import atexit, threading\n"
        "from keras_distplug.preemption.notices.watcher import Watcher\n"
        "begun, ending = threading.Event(), threading.Event()\n"
        "def poll():\n"
        "    begun.set()\n"
        "    ending.wait()\n"
        "    raise RuntimeError('the interpreter ends')\n"
        "def end():\n"
        "    ending.set()\n"
        "    watcher._thread.join(30)\n"
        "    print(watcher._thread.is_alive())\n"
        "atexit.register(end)\n"  # comes after what is registered later
        "watcher = Watcher(poll, print)\n"
        "assert begun.wait(30)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
