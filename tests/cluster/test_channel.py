from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

from cluster.key_values import Memory  # noqa: E402

from keras_distplug.cluster import agreement, channel  # noqa: E402
from keras_distplug.cluster.channel import Channel  # noqa: E402
from keras_distplug.cluster.roles import Role  # noqa: E402
from keras_distplug.core.errors import AgreementError  # noqa: E402

CLUSTER = {"worker": ("a:1", "b:1")}
CHIEF, OTHER = (Role("worker", index, CLUSTER, "a test") for index in range(2))


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets the counter of keys, which two workers in one process would otherwise share."""
    monkeypatch.setattr(channel, "_questions", itertools.repeat(1))


def test_from_chief() -> None:
    """Every worker returns the chief's value, even if it asks first and has a value itself."""
    store = Memory()
    chief, other = (Channel(role, store) for role in (CHIEF, OTHER))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(other.broadcast, "run", "run-0009")
        assert chief.broadcast("run", "run-0001") == "run-0001"
        assert waiting.result(timeout=10) == "run-0001"


@pytest.mark.parametrize(
    ("said", "first"),
    [((None, None), None), (("a", None), "a"), ((None, "b"), "b"), (("a", "b"), "a")],
)
def test_first_error(said: tuple[str | None, str | None], first: str | None) -> None:
    """All workers get the error of the first worker that has one."""
    store = Memory()
    workers = [Channel(role, store) for role in (CHIEF, OTHER)]
    with ThreadPoolExecutor() as pool:
        heard = [
            pool.submit(worker.first_error, "restored", complaint)
            for worker, complaint in zip(workers, said, strict=True)
        ]
        assert [each.result(timeout=10) for each in heard] == [first, first]


def test_gather() -> None:
    """All workers get all values, by rank; earlier messages are deleted."""
    store = Memory()
    workers = [Channel(role, store) for role in (CHIEF, OTHER)]
    with ThreadPoolExecutor() as pool:
        for topic in ("first", "second", "third"):
            asked = [pool.submit(w.gather, topic, str(n)) for n, w in enumerate(workers)]
            assert [each.result(timeout=10) for each in asked] == [["0", "1"], ["0", "1"]]
            [left] = store.values
            assert topic in left


def test_to_chief() -> None:
    """Only the chief gets all values; no worker waits for it, and nothing remains in the store."""
    store = Memory()
    chief, other = (Channel(role, store) for role in (CHIEF, OTHER))
    assert other.gather_on_chief("random", "b") is None
    assert chief.gather_on_chief("random", "a") == ["a", "b"]
    assert store.values == {}


def test_time_out() -> None:
    """If the chief does not answer, the error names the waiting worker, the time and the topic."""
    other = Channel(OTHER, Memory(), timeout_s=0.01)
    with pytest.raises(
        AgreementError, match="worker-1 waited 0 s for the chief's message on 'run'"
    ):
        other.broadcast("run", None)


def test_lost_worker() -> None:
    """A lost worker is distinguished from a slow one."""
    other = Channel(OTHER, Memory())
    with pytest.raises(
        AgreementError,
        match="lost another worker while waiting for all workers",
    ):
        other.barrier("finished")


def test_lost_chief() -> None:
    """A worker that cannot send its value has also lost another one."""
    store = Memory()
    store.breaks_at = "keras_distplug/1/random/1"
    with pytest.raises(
        AgreementError, match="lost another worker while waiting for the store to accept 'random'"
    ):
        Channel(OTHER, store).gather_on_chief("random", "b")


def test_topic_is_used_once() -> None:
    """A topic is used once per session."""
    store = Memory()
    chief, other = (Channel(role, store).below("a session") for role in (CHIEF, OTHER))
    assert chief.send_once("who", "chief")
    assert not other.send_once("who", "other")
    with pytest.raises(AgreementError, match=r"one message on 'a session/who'. Received: a second"):
        other.send("who", "other")
    assert other.receive("who", 10) == "chief"
    assert Channel(OTHER, store).below("another session").send_once("who", "other")
    chief.forget("who")
    assert list(store.values) == ["keras_distplug/told/another session/who"]


def test_sessions() -> None:
    """All workers get a channel of the same topics, which no other session has."""
    store = Memory()
    chief, other = (Channel(role, store) for role in (CHIEF, OTHER))
    for number in range(2):
        name = f"training {number}"
        of_chief, of_other = chief.session(name), other.session(name)
        of_chief.send("greeting", name)
        assert of_other.receive("greeting", 10) == name


def test_chief_without_a_value() -> None:
    """A chief without a value gets an error, instead of a timeout on other workers."""
    with pytest.raises(AgreementError, match=r"from the chief. Received: none"):
        Channel(CHIEF, Memory()).broadcast("run", None)


def test_alone() -> None:
    """A single process agrees with itself immediately."""
    alone = agreement.get_channel(Role("worker", 0, {}, "a test"))
    assert alone.broadcast("run", "run-0001") == "run-0001"
    alone.barrier("finished")
