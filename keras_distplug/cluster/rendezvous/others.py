"""The other workers wait for the chief."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict

from keras_distplug.cluster.rendezvous.messages import (
    CONNECT_SECS,
    PAUSE_SECS,
    Hello,
    Stranger,
    connect_interruptibly,
    encode_hello,
    get_address,
    get_name,
    get_reason,
    lost,
    receive,
    send,
)
from keras_distplug.cluster.rendezvous.waiting import Waiting
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ClusterError, PeerLostError

_STRANGER_SECS = 20.0  # for another program at the chief's address


def attend(role: Role, hello: Hello, listener: socket.socket, waiting: Waiting) -> None:
    """Waits, connected to the chief, until all workers have started."""
    chief = get_name(role, 0)
    stranger_since = None
    with _answering(listener, hello):
        while True:
            try:
                if _is_started(role, hello, waiting):
                    return
                why = "it closed the connection"
            except OSError as error:
                why, stranger_since = get_reason(error), None
            except Stranger as error:
                why = str(error)
                stranger_since = stranger_since or error.since
                if time.monotonic() - stranger_since > _STRANGER_SECS:
                    raise ClusterError(
                        f"{role.name} expected {chief}, but {why}. Free that port on "
                        "the chief's machine, or correct the chief's address for every task (from "
                        f"{role.source})."
                    ) from None
            else:
                stranger_since = None
            waiting.on(chief, why)
            time.sleep(PAUSE_SECS)


def _is_started(role: Role, hello: Hello, waiting: Waiting) -> bool:
    """Waits for the chief's answer on one connection; False once it is closed."""
    since, is_greeted = time.monotonic(), False
    with contextlib.closing(connect_interruptibly(get_address(role, 0))) as connection:
        send(connection, asdict(hello))
        for message in receive(connection):
            if message is None and is_greeted:
                waiting.on("the others", f"{get_name(role, 0)} has started")
            elif message is None:
                if time.monotonic() - since > _STRANGER_SECS:
                    raise Stranger("the program that listens there does not answer", since)
            elif "start" in message:
                return True
            elif "failed" in message:
                raise lost(role, encode_hello(message["failed"]))
            elif "refused" in message:
                raise ClusterError(message["refused"])
            elif "late" in message:
                raise PeerLostError(message["late"])
            else:
                is_greeted = True
                other = encode_hello(message)
                if other is not None and other.rank != 0:
                    raise Stranger(f"{other.name} answers there ({other.where})")
    return False


@contextlib.contextmanager
def _answering(listener: socket.socket, hello: Hello) -> Iterator[None]:
    """Introduces this process to every process that connects."""
    line = asdict(hello)
    listener.settimeout(PAUSE_SECS)
    is_over = threading.Event()

    def answer() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with contextlib.closing(connection):
                    connection.settimeout(CONNECT_SECS)
                    send(connection, line)
                    connection.recv(1)  # until the other end has closed

    thread = threading.Thread(target=answer, name="keras_distplug-meet", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        thread.join()
