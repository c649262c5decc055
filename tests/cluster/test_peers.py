"""The search for a lost worker, with a simulated service."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

import tensorflow as tf  # noqa: E402

from keras_distplug.cluster import peers  # noqa: E402
from keras_distplug.cluster.roles import Role  # noqa: E402
from keras_distplug.core.errors import AgreementError  # noqa: E402

CLOSED = tf.errors.UnavailableError(None, None, "Collective ops is aborted by: Socket closed")
STOPPED = "Task /job:worker/replica:0/task:2 heartbeat timeout. This indicates that"


class Service:
    """A service with given answers, the last of which is repeated."""

    heartbeat_timeout_s = 1.0

    def __init__(self, *answers: Sequence[str | None] | OSError) -> None:
        self.answers = list(answers)

    def task_errors(self) -> list[str | None]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return list(answer)

    def report(self, message: str) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_MARGIN_S", 0.1)


@pytest.fixture
def workers() -> Iterator[list[socket.socket]]:
    """Three workers that listen."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]


def role(workers: Sequence[socket.socket], index: int) -> Role:
    addresses = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in workers)
    return Role("worker", index, {"worker": addresses}, "a test")


WELL = [None, None, None]


def test_worker_with_a_closed_port(workers: list[socket.socket]) -> None:
    """A worker whose port is closed is named with its address, before the service knows."""
    here = role(workers, 1)
    workers[2].close()
    address = here.cluster["worker"][2]
    found = peers.lost(CLOSED, here, Service(WELL))
    assert found == f"worker-2 ({address}), where no process listens any longer"


def test_lost_chief(workers: list[socket.socket]) -> None:
    """If the chief is lost, so is the service; the message names the chief."""
    here = role(workers, 1)
    workers[0].close()
    found = peers.lost(CLOSED, here, Service(ConnectionError("refused")))
    assert (
        found
        == f"worker-0 (the chief, {here.cluster['worker'][0]}), where no process listens any longer"
    )


@pytest.mark.parametrize("answer", [TimeoutError("silence"), ConnectionError("no route")])
def test_lost_machine_of_the_chief(answer: OSError, workers: list[socket.socket]) -> None:
    """A service that does not answer for as long as a worker may be silent has lost its chief."""
    found = peers.lost(CLOSED, role(workers, 1), Service(answer))
    assert found is not None
    assert found.startswith("worker-0 (the chief, 127.0.0.1:")
    assert found.endswith("which no longer answers")


def test_no_second_wait_for_a_frozen_chief(workers: list[socket.socket]) -> None:
    """If TensorFlow has already waited for the chief, no second wait follows."""
    error = tf.errors.DeadlineExceededError(
        None,
        None,
        "Collective ops is aborted by: Deadline Exceeded\nRPC: /tensorflow.CoordinationService/"
        "Heartbeat",
    )
    service = Service(TimeoutError())
    service.heartbeat_timeout_s = 1e9
    assert peers.lost(error, role(workers, 1), service) == (
        f"worker-0 (the chief, 127.0.0.1:{workers[0].getsockname()[1]}), which no longer answers"
    )


def test_loss_reported_by_the_service(workers: list[socket.socket]) -> None:
    """A worker that listens but sends no heartbeats is lost once the service reports it."""
    found = peers.lost(CLOSED, role(workers, 0), Service(WELL, WELL, [None, None, STOPPED]))
    assert found is not None
    assert found.startswith("worker-2 (127.0.0.1:")
    assert found.endswith("which has sent no heartbeat for 1 s")


def test_report_precedes_exit(workers: list[socket.socket]) -> None:
    """Another worker's report has precedence over that worker's own exit."""
    word = (
        "keras_distplug lost <worker-2 (host:1), where no process listens any longer> by <worker-0>"
    )
    told = f"Error reported from /job:worker/task:0: {word}. Restart your program"
    here = role(workers, 1)
    workers[0].close()
    for error, answer in [
        (tf.errors.UnavailableError(None, None, told), ConnectionError("refused")),
        (CLOSED, [word, None, STOPPED]),
    ]:
        found = peers.lost(error, here, Service(answer))
        assert found == "worker-2 (host:1), where no process listens any longer"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        ConnectionError("a store's"),
        tf.errors.InvalidArgumentError(None, None, "shapes"),
        AgreementError("a worker that is slow"),
    ],
)
def test_other_errors(error: Exception, workers: list[socket.socket]) -> None:
    """An unrelated error is not attributed to a lost worker, even if one is lost."""
    here = role(workers, 0)
    workers[1].close()
    assert peers.lost(error, here, Service([None, STOPPED, None])) is None


def test_all_workers_are_healthy(workers: list[socket.socket]) -> None:
    """An error that may come from a connection is left as it is if all workers are healthy."""
    error = tf.errors.InternalError(None, None, "out of luck")
    assert peers.lost(error, role(workers, 0), Service(WELL)) is None


TARGET = " Additional GRPC error information from remote target /job:worker/replica:0/task:%d while"


@pytest.mark.parametrize(
    ("count", "target", "named"),
    [(2, "", "worker-0 (the chief, "), (3, "", "another worker"), (3, TARGET % 2, "worker-2 (")],
)
def test_link_between_workers(
    count: int, target: str, named: str, workers: list[socket.socket]
) -> None:
    """A broken connection between healthy workers is reported with the other worker. With two
    workers, this needs no wait for a heartbeat."""
    error = tf.errors.UnavailableError(
        None, None, f"Collective ops is aborted by: Connection reset by peer{target}"
    )
    service = Service(WELL[:count])
    service.heartbeat_timeout_s = 1e9 if count == 2 else 0.1
    found = peers.lost(error, role(workers[:count], 1), service)
    assert found is not None
    assert found.startswith(named)
    assert found.endswith(", to which the connection broke")


def test_connection_to_a_store(workers: list[socket.socket]) -> None:
    """Unreadable data does not count as a lost worker."""
    error = tf.errors.AbortedError(None, None, "libcurl code 56: Connection reset by peer")
    assert peers.lost(error, role(workers[:2], 1), Service(WELL[:2])) is None


def test_loss_reported_by_another_worker(workers: list[socket.socket]) -> None:
    """If another worker reports this one as lost, the error names that worker."""
    told = "keras_distplug lost <worker-0 (the chief, a:1), to which the> by <worker-1 (b:1)>"
    error = tf.errors.UnavailableError(None, None, told)
    found = peers.lost(error, role(workers, 0), Service(WELL))
    assert found == "worker-1 (b:1), which has lost this one"


def test_lost_in_an_agreement(workers: list[socket.socket]) -> None:
    """An interrupted agreement is examined, too, although Keras drops causes."""
    here = role(workers, 0)
    workers[1].close()
    error = AgreementError("waited for the message of worker 1")
    error.__context__ = ConnectionError("socket closed")
    found = peers.lost(error, here, Service(WELL))
    assert found is not None
    assert found.startswith("worker-1")
