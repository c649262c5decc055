"""Messages between workers that meet: a message is a line of JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import PeerLostError

PAUSE_SECS = 0.2
CONNECT_SECS = 2.0
UNRESOLVED = "its host name does not resolve"
MOST_BYTES = 1 << 22

_PROTOCOL = "keras_distplug"
_FRAME_BYTES = 9
_SETTINGS = b"\4\0\0\0\0\0"  # the rest of the head of a gRPC server's first frame

T = TypeVar("T")


@dataclass(frozen=True)
class Hello:
    """The introduction of a process.

    Args:
        rank: Its rank among the workers.
        name: Its name and address, for people.
        where: Its host and process, for people.
        token: A text that differs for every process.
        cluster: The addresses it was given, by task type.
        versions: The versions of the packages that must agree.
        error: Why it failed. Defaults to `""`: it waits.
    """

    rank: int
    name: str
    where: str
    token: str
    cluster: Mapping[str, list[str]]
    versions: Mapping[str, str]
    error: str = ""

    @classmethod
    def of(cls, role: Role, versions: Mapping[str, str], error: str = "") -> Hello:
        return cls(
            role.rank,
            get_name(role, role.rank),
            f"process {os.getpid()} on {socket.gethostname()}",
            uuid.uuid4().hex,
            {task: list(addresses) for task, addresses in role.cluster.items()},
            dict(versions),
            error,
        )


class TensorFlowWaits(Exception):
    """The other process already runs TensorFlow's server."""


class Stranger(Exception):
    """Another program is at the address, whether it answers or not.

    Args:
        what: The finding, for people.
        since: The time by the monotonic clock. Defaults to `None`: now.
    """

    def __init__(self, what: str, since: float | None = None) -> None:
        super().__init__(what)
        self.since = time.monotonic() if since is None else since


def ask(address: str) -> Hello | None:
    """Returns the process that answers there. Raises OSError if none does."""
    with contextlib.closing(connect(address)) as connection:
        try:
            said = next(receive(connection, time.monotonic() + CONNECT_SECS), None)
        except (TensorFlowWaits, Stranger):
            return None
        return None if said is None else encode_hello(said)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECS)
    except UnicodeError:
        raise socket.gaierror(f"{host} is not a host name") from None
    keep_alive(connection)
    return connection


def connect_interruptibly(address: str) -> socket.socket:
    """Connects; signals are handled even during a name lookup."""
    return run_in_background(functools.partial(connect, address)).result()


def run_in_background(act: Callable[[], T]) -> Future[T]:
    """Runs `act` in a thread that does not delay the exit of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except Exception as error:  # noqa: BLE001 (raised by `result`)
            future.set_exception(error)

    threading.Thread(target=run, name="keras_distplug-connect", daemon=True).start()
    return future


def receive(
    connection: socket.socket, end_s: float | None = None
) -> Iterator[Mapping[str, Any] | None]:
    """Yields messages until the other end closes or `end_s` is over; None while it is silent."""
    data = b""
    connection.settimeout(PAUSE_SECS)
    while end_s is None or time.monotonic() < end_s:
        try:
            received = connection.recv(1 << 16)
        except TimeoutError:
            if end_s is None:
                yield None
            continue
        if not received:
            return
        data += received
        if len(data) > MOST_BYTES or not data.startswith(b"{"):
            if len(data) < _FRAME_BYTES and data.startswith(b"\0"):
                continue
            if data[3:_FRAME_BYTES] == _SETTINGS:
                raise TensorFlowWaits
            raise Stranger("another program answers there")
        while b"\n" in data:
            line, _, data = data.partition(b"\n")
            message = _parsed(line)
            if message is None:
                raise Stranger("another program answers there")
            yield message


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps({_PROTOCOL: 1, **message}).encode() + b"\n")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    if not isinstance(message, dict) or message.pop(_PROTOCOL, None) != 1:
        return None
    return message


def decode_hello(line: bytes) -> Hello | None:
    message = _parsed(line)
    return None if message is None else encode_hello(message)


def encode_hello(message: Mapping[str, Any]) -> Hello | None:
    try:
        hello = Hello(**message)
    except TypeError:  # from another version, or not a hello
        return None
    texts = (hello.name, hello.where, hello.token, hello.error)
    maps = (hello.cluster, hello.versions)
    is_one = isinstance(hello.rank, int) and all(isinstance(each, dict) for each in maps)
    return hello if is_one and all(isinstance(each, str) for each in texts) else None


def keep_alive(connection: socket.socket) -> None:
    """Notices within half a minute that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def get_address(role: Role, rank: int) -> str:
    return (*role.cluster.get("chief", ()), *role.cluster.get("worker", ()))[rank]


def get_name(role: Role, rank: int) -> str:
    return f"{role.workers[rank]} ({'the chief, ' * (rank == 0)}{get_address(role, rank)})"


def get_reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return UNRESOLVED
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def lost(role: Role, failed: Hello | None) -> PeerLostError:
    who = f"{failed.name} ({failed.where})" if failed is not None else "another worker"
    why = failed.error if failed is not None else "see its output"
    return PeerLostError(
        f"{role.name} cannot train, because {who} failed before it joined. Fix the cause, and "
        f"start all workers again. The cause: {why}"
    )
