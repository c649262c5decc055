"""Workers that wait for each other before TensorFlow connects them: threads, and processes without
TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from support.cluster import environment, free_ports
from support.networks import hosts
from support.processes import Process

from keras_distplug.cluster import ports, rendezvous
from keras_distplug.cluster.rendezvous import chief, messages, others, waiting
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ClusterError, ConfigurationError, PeerLostError

pytestmark = pytest.mark.timeout(120)

VERSIONS = {"Keras": "3.15.1"}
SETTINGS = b"\0\0\x0c\4\0\0\0\0\0" + bytes(12)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_FIRST_LINE_SECS", 0.0)
    monkeypatch.setattr(waiting, "_FAREWELL_SECS", 20.0)
    monkeypatch.setattr(others, "_STRANGER_SECS", 1.0)
    monkeypatch.setattr(ports.listen, "__defaults__", (0.5,))


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the wait in tests in which a worker never starts."""
    monkeypatch.setattr(waiting, "_FAREWELL_SECS", 1.0)
    monkeypatch.setattr(chief, "_PATIENCE_SECS", 1.0)


def roles(workers: int) -> list[Role]:
    cluster = {"worker": tuple(f"127.0.0.1:{port}" for port in free_ports(workers))}
    return [Role("worker", index, cluster, "TF_CONFIG") for index in range(workers)]


def at(role: Role, index: int, address: str) -> Role:
    """Returns `role` with a different address of one worker."""
    addresses = list(role.cluster["worker"])
    addresses[index] = address
    return dataclasses.replace(role, cluster={"worker": tuple(addresses)})


def outcomes(*acts: Callable[[], None]) -> list[BaseException | None]:
    """Runs functions concurrently, and returns how they end."""
    errors: list[BaseException | None] = [None] * len(acts)

    def note(index: int) -> None:
        try:
            acts[index]()
        except BaseException as error:  # noqa: BLE001 (is returned)
            errors[index] = error

    # Daemons: one that waits for a failed worker must not block the end of the test run.
    threads = [threading.Thread(target=note, args=(i,), daemon=True) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), errors
    return errors


def meet(role: Role, versions: dict[str, str] = VERSIONS) -> Callable[[], None]:
    return lambda: rendezvous.meet(role, versions)


def fail(role: Role) -> Callable[[], None]:
    return lambda: rendezvous.report_failure(role, "ValueError: no data")


def announced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the lines that waiting workers print, without a pause between them."""
    lines: list[str] = []
    monkeypatch.setattr(waiting, "announce", lines.append)
    monkeypatch.setattr(waiting, "_LINE_EVERY_SECS", 0.0)
    return lines


def await_two(lines: list[str]) -> None:
    """Returns once one other worker has connected to the chief of three."""
    while not any("2 of 3 have started" in line for line in list(lines)):
        time.sleep(0.01)


@contextmanager
def serving(role: Role, answer: bytes | None) -> Iterator[list[bytes]]:
    """Runs another program at the chief's address. Yields the bytes that it receives."""
    port = int(role.cluster["worker"][0].rpartition(":")[2])
    received: list[bytes] = []
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                continue
            with closing(connection):
                received.append(connection.recv(1 << 16))
                if answer is None:
                    is_over.wait(30)
                else:
                    connection.sendall(answer)

    with closing(socket.create_server(("127.0.0.1", port))) as server:
        server.settimeout(0.1)
        thread = threading.Thread(target=serve)
        thread.start()
        yield received
        is_over.set()
        thread.join()


@pytest.mark.parametrize("workers", [2, 5])
def test_all_start(workers: int) -> None:
    """All workers return once all have started, and their ports are free for TensorFlow."""
    all_roles = roles(workers)
    assert outcomes(*map(meet, all_roles)) == [None] * workers
    for role in all_roles:
        ports.require_free(role)


def test_late_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting workers report the missing one and its address; also an unknown host name."""
    lines = announced(monkeypatch)
    first, worker, last = roles(3)
    nowhere = at(worker, 0, "not-a-host.invalid:2222")

    def come_last() -> None:
        def said(*words: str) -> bool:
            return any(all(word in line for word in words) for line in list(lines))

        while not (said("worker-0 is waiting for", last.name) and said("does not resolve")):
            time.sleep(0.01)
        monkeypatch.setattr(others, "get_address", address)
        rendezvous.meet(last, VERSIONS)

    address = others.get_address
    # The name resolves once the last worker has started.
    monkeypatch.setattr(
        others,
        "get_address",
        lambda role, rank: address(nowhere if (role.rank, rank) == (1, 0) else role, rank),
    )
    assert outcomes(meet(first), meet(worker), come_last) == [None] * 3
    where = last.cluster["worker"][2]
    assert any(f"waiting for worker-1 ({worker.cluster['worker'][1]})" in line for line in lines)
    assert any(f"worker-2 ({where}) to join" in line for line in lines)


@pytest.mark.usefixtures("_impatient")
def test_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout, the error names the missing worker, on all workers."""
    monkeypatch.setenv(waiting.LIMIT, "1.5")
    first, worker, _ = roles(3)
    for error in outcomes(meet(first), meet(worker)):
        assert isinstance(error, PeerLostError)
        assert waiting.LIMIT in str(error)
    monkeypatch.setenv(waiting.LIMIT, "soon")
    with pytest.raises(ConfigurationError, match=r"a number of seconds, above 0.*'soon'"):
        rendezvous.meet(first, VERSIONS)


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_another_worker(failing: int) -> None:
    """A process that fails before it joins ends the others, with its error."""
    all_roles = roles(3)
    acts = [fail(role) if role.rank == failing else meet(role) for role in all_roles]
    errors = outcomes(*acts)
    assert errors.pop(failing) is None
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert f"worker-{failing} (" in str(error)
        assert "The cause: ValueError: no data" in str(error)


def test_port_in_use() -> None:
    """A worker that cannot listen reports that, and the others end."""
    all_roles = roles(3)
    port = int(all_roles[2].cluster["worker"][2].rpartition(":")[2])
    with closing(socket.create_server(("127.0.0.1", port))):
        *others, own = outcomes(*map(meet, all_roles))
    assert isinstance(own, ClusterError)
    for error in others:
        assert isinstance(error, PeerLostError)
        assert f"worker-2 cannot listen on port {port}" in str(error)


def test_different_versions() -> None:
    first, worker, other = roles(3)
    errors = outcomes(meet(first), meet(worker), meet(other, {"Keras": "3.14.0"}))
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "the same version of Keras on all workers. Received: 3.15.1 on" in str(error)
        assert "3.14.0" in str(error)


@pytest.mark.usefixtures("_impatient")
def test_different_clusters() -> None:
    """A worker with another cluster is refused; the others end if the right one never starts."""
    first, worker, other = roles(3)
    *errors, refused = outcomes(meet(first), meet(worker), meet(at(other, 1, "127.0.0.1:9")))
    assert isinstance(refused, ClusterError)
    for error in (*errors, refused):
        assert isinstance(error, ClusterError | PeerLostError)
        assert "were given different clusters" in str(error)
        assert "127.0.0.1:9" in str(error)


def test_worker_of_an_earlier_start() -> None:
    """A process of another cluster does not end workers whose own peers start."""
    first, worker, last = roles(3)

    def come_after_it() -> None:
        [refused] = outcomes(meet(at(last, 1, "127.0.0.1:9")))
        assert isinstance(refused, ClusterError)
        rendezvous.meet(last, VERSIONS)

    assert outcomes(meet(first), meet(worker), come_after_it) == [None] * 3


def test_restarted_worker() -> None:
    """A worker that vanished during the wait may return, even before its broken connection is
    noticed."""
    first, worker, last = roles(3)
    host, _, port = first.cluster["worker"][0].rpartition(":")

    def come_back() -> None:
        with connected(host, int(port)) as vanished:
            hello = dataclasses.asdict(messages.Hello.of(last, VERSIONS))
            messages.send(vanished, hello)
            vanished.recv(1 << 16)
            thread = threading.Timer(0.3, vanished.close)
            thread.start()
            rendezvous.meet(last, VERSIONS)
            thread.join()

    assert outcomes(meet(first), meet(worker), come_back) == [None] * 3


def connected(host: str, port: int) -> socket.socket:
    """Connects to the chief, which may not listen yet."""
    while True:
        try:
            return socket.create_connection((host, port), 5)
        except ConnectionRefusedError:
            time.sleep(0.01)


@pytest.mark.parametrize("is_late", [False, True])
def test_reconnected(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose connection broke returns with a second one, even if the data of the first one
    arrives later."""
    first, worker, last = roles(3)
    lines = announced(monkeypatch)
    host, _, port = first.cluster["worker"][0].rpartition(":")
    hello = messages.Hello.of(worker, VERSIONS)

    def come_twice() -> None:
        with (
            connected(host, int(port)) as lost,
            connected(host, int(port)) as again,
            ports.listen(worker) as own,
            others._answering(own, hello),
        ):
            for connection in reversed((lost, again)) if is_late else (lost, again):
                messages.send(connection, dataclasses.asdict(hello))
                await_two(lines)
            threading.Thread(target=meet(last), daemon=True).start()
            answers = (each for each in messages.receive(again, time.monotonic() + 20) if each)
            assert any("start" in each for each in answers)

    assert outcomes(meet(first), come_twice) == [None, None]


def test_failure_of_an_unrelated_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program in the same container may use the port."""
    first, worker, last = roles(3)
    lines = announced(monkeypatch)

    def fail_beside() -> None:
        thread = threading.Thread(target=meet(worker), daemon=True)
        thread.start()
        host, _, port = first.cluster["worker"][0].rpartition(":")
        await_two(lines)
        hello = messages.Hello.of(worker, VERSIONS, "ValueError: no data")
        with connected(host, int(port)) as connection:
            messages.send(connection, dataclasses.asdict(hello))
            for _ in messages.receive(connection, time.monotonic() + 20):
                pass  # until it is rejected
        rendezvous.meet(last, VERSIONS)
        thread.join(30)
        assert not thread.is_alive()

    assert outcomes(meet(first), fail_beside) == [None, None]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_chief(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others stop waiting."""
    first, worker, _ = roles(3)

    def interrupt(line: str) -> None:
        if "2 of 3 have started" in line:
            raise error

    monkeypatch.setattr(waiting, "announce", interrupt)
    monkeypatch.setattr(waiting, "_LINE_EVERY_SECS", 0.0)
    interrupted, other = outcomes(meet(first), meet(worker))
    assert isinstance(interrupted, error)
    assert isinstance(other, PeerLostError)
    assert f"The cause: {error.__name__}" in str(other)


@pytest.mark.usefixtures("_impatient")
def test_same_index_twice() -> None:
    first, worker, _ = roles(3)
    [port] = free_ports(1)
    errors = outcomes(meet(first), meet(worker), meet(at(worker, 1, f"127.0.0.1:{port}")))
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "Two processes claim to be worker-1" in str(error)


def test_own_address_may_differ() -> None:
    """With some schedulers, a process knows itself by another name than the others do."""
    first, worker = roles(2)
    port = worker.cluster["worker"][1].rpartition(":")[2]
    assert outcomes(meet(first), meet(at(worker, 1, f"localhost:{port}"))) == [None, None]


@pytest.mark.usefixtures("_impatient")
def test_unreachable_address() -> None:
    """A worker that the others cannot reach at its address is named before TensorFlow tries."""
    first, worker = roles(2)
    [port] = free_ports(1)
    errors = outcomes(meet(at(first, 1, f"127.0.0.1:{port}")), meet(worker))
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert f"worker-1 ({worker.cluster['worker'][1]}) has started" in str(error)
        assert "the chief cannot reach it at its address: connection refused" in str(error)


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(9)])
def test_stranger_at_the_chiefs_address(answer: bytes | None) -> None:
    _, worker = roles(2)
    with serving(worker, answer) as received:
        [error] = outcomes(meet(worker))
    assert received
    assert isinstance(error, ClusterError)
    assert f"expected worker-0 (the chief, {worker.cluster['worker'][0]})" in str(error)


def test_another_worker_at_the_chiefs_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_FAREWELL_SECS", 5.0)  # the third worker never starts
    _, worker, last = roles(3)
    mistaken = at(last, 0, worker.cluster["worker"][1])
    thread = threading.Thread(target=lambda: outcomes(meet(worker)), daemon=True)
    thread.start()
    [error] = outcomes(meet(mistaken))
    assert isinstance(error, ClusterError)
    assert "answers there" in str(error)
    outcomes(fail(dataclasses.replace(worker, index=0)))
    thread.join(30)
    assert not thread.is_alive()


def test_chief_that_makes_the_strategy_itself() -> None:
    """If the chief's script makes the strategy itself, TensorFlow waits for the chief."""
    _, worker = roles(2)
    with serving(worker, SETTINGS) as received:
        assert outcomes(meet(worker)) == [None]
    assert received


def test_worker_that_makes_the_strategy_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose script makes the strategy itself: the others start."""
    lines = announced(monkeypatch)
    first, worker, _ = roles(3)
    host, _, port = first.cluster["worker"][0].rpartition(":")

    def knock() -> None:
        await_two(lines)
        with socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(PREFACE)
            connection.recv(1 << 16)

    assert outcomes(meet(first), meet(worker), knock) == [None] * 3


def test_unrelated_connections() -> None:
    """Connections of probes and scanners are closed."""
    first, worker = roles(2)
    host, _, port = first.cluster["worker"][0].rpartition(":")

    def probe() -> None:
        stranger = dataclasses.asdict(dataclasses.replace(messages.Hello.of(worker, {}), rank=7))
        for said in (
            *(*[b""] * 5, b"GET /healthz HTTP/1.1\r\n\r\n", b"{}\n", b'{"keras_distplug": 1}\n'),
            json.dumps({"keras_distplug": 1, **stranger}).encode() + b"\n",
            json.dumps({"keras_distplug": 1, **stranger, "rank": "1"}).encode() + b"\n",
        ):
            with connected(host, int(port)) as connection, contextlib.suppress(ConnectionError):
                if not said:  # a reset, as some probes do
                    gone_at_once = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, gone_at_once)
                    continue
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
        rendezvous.meet(worker, VERSIONS)

    assert outcomes(meet(first), probe) == [None, None]


ALONE = """
import sys
from keras_distplug.cluster import rendezvous
from keras_distplug.cluster.rendezvous import chief, waiting
from keras_distplug.cluster.roles import Role
waiting._FIRST_LINE_SECS = 0.0
chief._OWN_EVERY_SECS = waiting._FAREWELL_SECS = chief._PATIENCE_SECS = 0.1
index, *addresses = sys.argv[1:]
rendezvous.meet(Role("worker", int(index), {"worker": tuple(addresses)}, "TF_CONFIG"), {})
"""


def await_wait(process: Process) -> None:
    end_s = time.monotonic() + 30
    while "is waiting for" not in process.output():
        assert process.poll() is None, process.output()
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("index", [0, 1])
def test_signals_end_the_wait(index: int, number: signal.Signals) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    command = ["-c", ALONE, str(index), *addresses]
    with Process(command, environment(), is_forked=False) as process:
        await_wait(process)
        process.send_signal(number)
        code = process.wait(20)
        assert code in (-number, 130) or "KeyboardInterrupt" in process.output()


def test_two_chiefs() -> None:
    """If two machines have index 0, the one that is not at the chief's address names the one that
    is."""
    with hosts(2) as machines:
        [port] = free_ports(1)
        cluster = [f"{machine.address}:{port}" for machine in machines]
        command = ["-c", ALONE, "0", *cluster]
        with (
            Process(command, environment(), prefix=machines[0].prefix, is_forked=False) as first,
            Process(command, environment(), prefix=machines[1].prefix, is_forked=False) as second,
        ):
            assert second.wait(60) == 1
            assert "Expected every process to have its own address and index" in second.output()
            assert first.poll() is None
