"""A proxy in front of an HTTP store that injects faults."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

Harm = Literal["status", "reset_request", "reset_reply", "stall", "lost_reply"]
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: discards unsent data and resets the connection


@dataclass
class Rule:
    """A fault that hits requests.

    Args:
        harm: `"status"` answers with `code`. `"reset_request"` and `"reset_reply"` reset the
            connection after `after_bytes` of the data sent or received. `"stall"` accepts requests
            and does not answer until all rules are removed. `"lost_reply"` resets it once the store
            has executed the request.
        method: The method of the requests.
        path: A pattern that their path contains.
        times: The number of requests to hit.
        code: The status of the answer.
        after_bytes: The number of bytes before a reset.
        rate: The probability with which such a request is hit.

    """

    harm: Harm
    method: str = ".*"
    path: str = ""
    times: int = 10**9
    code: int = 503
    after_bytes: int = 0
    rate: float = 1.0


class Proxy:
    """Passes on requests that no rule hits.

    Attributes:
        port: The port it listens on.
        harmed: The number of requests hit.
        requests: The methods and paths of all requests.
        stop: Stops it; set once it serves.

    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._rules: list[Rule] = []
        self._chance = random.Random(0)
        self.port = 0
        self.harmed = 0
        self.requests: list[tuple[str, str]] = []
        self.stop: Callable[[], object]
        self._stopped: asyncio.Event
        self._mended: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._serving: set[asyncio.Task[None] | None] = set()  # asyncio holds only weak references

    def harm(self, rule: Rule) -> None:
        self._rules.append(replace(rule))  # it counts down

    def mend(self) -> None:
        self._rules.clear()
        self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self._mended.set()
        self._mended = asyncio.Event()

    async def serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._serve_one, "127.0.0.1", 0, limit=2**20)
        self.port = server.sockets[0].getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self._stopped, self._mended = asyncio.Event(), asyncio.Event()
        self.stop = lambda: self._loop.call_soon_threadsafe(self._stopped.set)
        ready.set()
        await self._stopped.wait()
        server.close()
        self._release()

    def _rule_for(self, method: str, path: str) -> Rule | None:
        for rule in self._rules:
            is_meant = rule.times and re.fullmatch(rule.method, method)
            if is_meant and re.search(rule.path, path) and self._chance.random() < rule.rate:
                rule.times -= 1
                self.harmed += 1
                return rule
        return None

    async def _serve_one(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        """Handles one request: neither side may reuse its connection."""
        self._serving.add(asyncio.current_task())
        store_out: asyncio.StreamWriter | None = None
        try:
            head = (await client.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
            method, path, _ = head[0].split(" ", 2)
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
            self.requests.append((method, path))
            rule = self._rule_for(method, path)
            if headers.pop("expect", "") == "100-continue":
                answer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if rule and rule.harm == "status":
                await _drain_body(client, headers)
                body = b"<Error><Code>SlowDown</Code><Message>told to</Message></Error>"
                answer.write(
                    f"HTTP/1.1 {rule.code} No\r\nContent-Length: {len(body)}\r\n"
                    "Content-Type: application/xml\r\nConnection: close\r\n\r\n".encode()
                )
                answer.write(b"" if method == "HEAD" else body)
                await answer.drain()
                return
            if rule and rule.harm == "stall":
                await _drain_body(client, headers)
                await self._mended.wait()
                return
            store_in, store_out = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            kept = [h for h in head[:-2] if h.lower().split(":")[0] not in ("expect", "connection")]
            store_out.write("\r\n".join([*kept, "Connection: close", "", ""]).encode("latin1"))
            sent = 0
            async for part in _body(client, headers):
                if rule and rule.harm == "reset_request" and sent >= rule.after_bytes:
                    break
                store_out.write(part)
                await store_out.drain()
                sent += len(part)
            if rule and rule.harm == "reset_request":
                _reset(answer, store_out)
                return
            received = 0
            while part := await store_in.read(2**16):
                received += len(part)
                if not (rule and rule.harm == "lost_reply"):
                    answer.write(part)
                    await answer.drain()
                if rule and rule.harm == "reset_reply" and received > rule.after_bytes:
                    break
            if rule:
                _reset(answer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._serving.discard(asyncio.current_task())
            for each in (answer, store_out):
                if each is not None:
                    each.close()


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str]
) -> asyncio.AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while True:
            line = await reader.readline()
            size = int(line.split(b";")[0], 16)
            yield line + await reader.readexactly(size + 2)
            if not size:
                return
    left = int(headers.get("content-length", 0))
    while left:
        part = await reader.read(min(left, 2**16))
        if not part:
            raise ConnectionError("the client is gone")
        left -= len(part)
        yield part


async def _drain_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> None:
    async for _ in _body(reader, headers):
        pass


def _reset(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()


@contextmanager
def in_front_of(port: int) -> Iterator[Proxy]:
    """Yields a proxy that runs in a separate thread."""
    proxy, ready = Proxy(port), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(proxy.serve(ready)), daemon=True)
    thread.start()
    assert ready.wait(timeout=30)
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(timeout=30)
