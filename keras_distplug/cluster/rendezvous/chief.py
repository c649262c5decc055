"""The chief waits for all other workers, and checks that they agree."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from keras_distplug.cluster.rendezvous.messages import (
    CONNECT_SECS,
    MOST_BYTES,
    PAUSE_SECS,
    UNRESOLVED,
    Hello,
    TensorFlowWaits,
    ask,
    decode_hello,
    get_address,
    get_name,
    get_reason,
    keep_alive,
    lost,
    run_in_background,
    send,
)
from keras_distplug.cluster.rendezvous.waiting import Waiting, farewell_secs
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ClusterError, PeerLostError

_PATIENCE_SECS = 25.0  # an address may soon be correct, or an old process exit
_OWN_EVERY_SECS = 5.0  # how often the chief checks its own address
_OF_GRPC = b"PRI * HTTP/2"  # a client's first bytes
_CONNECTORS = 32


class Chief:
    """Gathers the other workers."""

    def __init__(self, role: Role, hello: Hello, listener: socket.socket, waiting: Waiting) -> None:
        self._role = role
        self._hello = hello
        self._waiting = waiting
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)
        self._buffers: dict[socket.socket, bytes] = {}
        self._hellos: dict[socket.socket, Hello] = {}
        self._since: dict[socket.socket, float] = {}
        self._refusals: dict[int, tuple[float, str]] = {}
        self._unreached_since: dict[socket.socket, float] = {}
        self._is_dismissing = False
        self._own: Future[Hello | None] | None = None
        self._own_at = 0.0
        self._other_since: float | None = None

    def gather(self) -> None:
        """Starts all workers once they have connected and agree."""
        with self._closing(), self._failing_together():
            while not self._are_all_here() or not self._are_all_reached():
                self._turn()
                self._require_own_address()
            self._answer({"start": True}, self._hellos)

    def _are_all_here(self) -> bool:
        now, ranks = time.monotonic(), [hello.rank for hello in self._hellos.values()]
        missing = sorted(set(range(1, self._role.world_size)) - set(ranks))
        for rank in missing:
            since, refusal = self._refusals.get(rank, (now, ""))
            if now - since > _PATIENCE_SECS:
                raise PeerLostError(refusal)
        if missing:
            here = self._role.world_size - len(missing)
            names = [get_name(self._role, rank) for rank in missing]
            self._waiting.on(_listed(names), f"{here} of {self._role.world_size} have started")
        return not self._has_rivals(ranks, now) and not missing

    def _has_rivals(self, ranks: list[int], now: float) -> bool:
        """Returns whether several processes claim the same index; one may be about to exit."""
        for rank in {rank for rank in ranks if ranks.count(rank) > 1}:
            rivals = [c for c, hello in self._hellos.items() if hello.rank == rank]
            if now - max(self._since[each] for each in rivals) > _PATIENCE_SECS:
                first, second = (self._hellos[each] for each in rivals[:2])
                raise ClusterError(
                    f"Two processes claim to be {second.name}: {first.where}, and {second.where}. "
                    "Expected every process to have its own index. Check the index that each was "
                    "given ('task' in TF_CONFIG, if that is set), and whether a process of an "
                    "earlier start is still running."
                )
            self._waiting.on(get_name(self._role, rank), "two processes claim this index")
            return True
        return False

    def fail(self) -> None:
        """Reports to all other workers that this process has failed."""
        with self._closing():
            self._dismiss({"failed": asdict(self._hello)})

    def _dismiss(self, message: Mapping[str, Any]) -> None:
        """Sends a message to all other workers, and waits a while for those still to come."""
        self._is_dismissing = True
        end_s = time.monotonic() + farewell_secs(self._role)
        told: dict[socket.socket, int] = {}
        while True:
            new = {c: hello.rank for c, hello in self._hellos.items() if c not in told}
            self._answer(message, new)
            told |= new
            if len(set(told.values())) >= self._role.world_size - 1 or time.monotonic() > end_s:
                return
            self._turn()

    def _turn(self) -> None:
        for key, _ in self._selector.select(PAUSE_SECS):
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key.fileobj)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the other end has already closed
            connection, _ = self._listener.accept()
            keep_alive(connection)
            connection.settimeout(CONNECT_SECS)
            self._buffers[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)
            # Shows a process that checks an address which worker answers.
            send(connection, asdict(self._hello) if not self._hello.error else {})
            connection.setblocking(False)

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._buffers:
            return  # forgotten in this turn
        try:
            received = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        data = self._buffers[connection] + received
        self._buffers[connection] = data
        if data.startswith(_OF_GRPC) and self._is_dismissing:
            self._forget(connection)
            return
        if data.startswith(_OF_GRPC):
            self._answer({"start": True}, self._hellos)
            raise TensorFlowWaits
        line, newline, _ = data.partition(b"\n")
        if newline and connection not in self._hellos:
            if (hello := decode_hello(line)) is not None:
                self._receive(connection, hello)
                return
            received = b""
        if not received or len(data) > MOST_BYTES:
            self._forget(connection)

    def _receive(self, connection: socket.socket, hello: Hello) -> None:
        accepted = list(self._buffers)
        same = [c for c, each in self._hellos.items() if each.token == hello.token]
        *lost, newest = sorted((*same, connection), key=accepted.index)  # it has connected again
        for each in lost:
            self._forget(each)
        if newest is not connection:
            return
        has_other = any(each.rank == hello.rank for each in self._hellos.values())
        if not 0 < hello.rank < self._role.world_size or (hello.error and has_other):
            self._forget(connection)
            return
        if not self._is_dismissing and (refusal := _different_cluster(self._hello, hello)):
            # It may belong to an earlier start, and the right one may still come.
            self._answer({"refused": refusal}, [connection])
            self._forget(connection)
            self._refusals[hello.rank] = (time.monotonic(), refusal)
            return
        self._hellos[connection] = hello
        self._since[connection] = time.monotonic()
        if self._is_dismissing:
            return
        if hello.error:
            raise _Failed(hello)
        _require_same_versions(self._hello, hello)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._buffers.pop(connection)
        for known in (self._hellos, self._since, self._unreached_since):
            known.pop(connection, None)
        connection.close()

    def _answer(self, message: Mapping[str, Any], whom: Iterable[socket.socket]) -> None:
        for connection in whom:
            with contextlib.suppress(OSError):
                connection.setblocking(True)
                connection.settimeout(CONNECT_SECS)
                send(connection, message)

    def _require_own_address(self) -> None:
        """Checks in the background, every few seconds, that no other process answers there."""
        if self._own is None:
            self._own = run_in_background(lambda: ask(get_address(self._role, 0)))
            self._own_at = time.monotonic()
        if not self._own.done():
            return
        # Not every network leads a machine's own address back to it.
        other = None if self._own.exception() else self._own.result()
        if other is None or other.token == self._hello.token:
            self._other_since = None
        elif self._other_since is None:  # an old process may be about to exit
            self._other_since = time.monotonic()
        elif time.monotonic() - self._other_since > _PATIENCE_SECS:
            raise ClusterError(
                f"{self._hello.name} is this process ({self._hello.where}), but at that address "
                f"{other.where} answers. Expected every process to have its own address and "
                "index: check the cluster definition of both (TF_CONFIG, if that is set)."
            )
        if time.monotonic() - self._own_at > _OWN_EVERY_SECS:
            self._own = None

    def _are_all_reached(self) -> bool:
        """Returns whether the address of every other worker leads to it."""
        now, asked = time.monotonic(), dict(self._hellos)
        with ThreadPoolExecutor(_CONNECTORS) as pool:
            reasons = list(pool.map(self._reach, asked.values()))
        unreached = {c: reason for c, reason in zip(asked, reasons, strict=True) if reason}
        self._unreached_since = {c: self._unreached_since.get(c, now) for c in unreached}
        for connection, reason in unreached.items():
            hello = asked[connection]
            # The name of a new pod may take a while to resolve.
            is_final = reason != UNRESOLVED
            if is_final and now - self._unreached_since[connection] > _PATIENCE_SECS:
                raise PeerLostError(
                    f"{hello.name} has started ({hello.where}), but the chief cannot reach it at "
                    f"its address: {reason}. Expected an address at which all other workers can "
                    "reach it. Correct its address for every task (from "
                    f"{self._role.source}), or open the port in the firewall."
                )
            self._waiting.on(hello.name, f"the chief cannot reach it: {reason}")
        self._turn()  # one of them may have left meanwhile
        return not unreached and asked.keys() == self._hellos.keys()

    def _reach(self, hello: Hello) -> str:
        """Returns why its address does not lead to it; an empty string if it does."""
        try:
            found = ask(get_address(self._role, hello.rank))
        except OSError as error:
            return get_reason(error)
        if found is None:
            return "another program answers"
        return "" if found.token == hello.token else f"{found.where} answers as {found.name}"

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except _Failed as failure:
            self._dismiss({"failed": asdict(failure.hello)})
            raise lost(self._role, failure.hello) from None
        except (ClusterError, PeerLostError) as error:
            is_refused = isinstance(error, ClusterError)
            self._dismiss({"refused" if is_refused else "late": str(error)})
            raise
        except TensorFlowWaits:
            raise
        except BaseException as error:
            failed = replace(self._hello, error=f"{type(error).__name__}: {error}")
            self._answer({"failed": asdict(failed)}, self._hellos)
            raise

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            # The workers close first, so that TIME_WAIT is on their side: TensorFlow needs this
            # port.
            end_s = time.monotonic() + CONNECT_SECS
            for connection in self._hellos:
                with contextlib.suppress(OSError):
                    while (left_s := end_s - time.monotonic()) > 0:
                        connection.settimeout(left_s)
                        if not connection.recv(1 << 16):
                            break
            for connection in self._buffers:
                connection.close()
            self._selector.close()


class _Failed(Exception):
    def __init__(self, hello: Hello) -> None:
        super().__init__(hello.error)
        self.hello = hello


def _different_cluster(chiefs: Hello, other: Hello) -> str:
    """Returns the difference as a message, or an empty string."""
    # A process may know itself by another address than the others do.
    if _without(chiefs.cluster, chiefs, other) == _without(other.cluster, chiefs, other):
        return ""
    return (
        f"{chiefs.name} and {other.name} were given different clusters. Expected the same "
        f"addresses on all workers. Received: {json.dumps(chiefs.cluster)} by {chiefs.where}, "
        f"{json.dumps(other.cluster)} by {other.where}."
    )


def _require_same_versions(chiefs: Hello, other: Hello) -> None:
    for package, version in chiefs.versions.items():
        if other.versions.get(package) != version:
            raise ClusterError(
                f"Expected the same version of {package} on all workers. Received: {version} on "
                f"{chiefs.name}, and {other.versions.get(package, 'none')} on {other.name} "
                f"({other.where}). Install the same version on all of them."
            )


def _without(cluster: Mapping[str, list[str]], *hellos: Hello) -> list[str]:
    """Returns the addresses of all other workers, by rank."""
    addresses = [*cluster.get("chief", ()), *cluster.get("worker", ())]
    own = {hello.rank for hello in hellos}
    return ["" if rank in own else address for rank, address in enumerate(addresses)]


def _listed(names: list[str]) -> str:
    shown = names[:8]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
