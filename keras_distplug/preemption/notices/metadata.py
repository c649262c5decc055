"""One request to a cloud's metadata server, over in bounded time whatever the server does.

urllib3 takes no proxy from the environment, and a single connection of it follows no redirect and
tries nothing again: a metadata address must reach this machine's own server, or none.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url

from keras_distplug.core.errors import MetadataError

# Where AWS, Google and Azure have it. No name, since looking one up has no time-out.
ADDRESS = "http://169.254.169.254"
# A server on the own host answers within milliseconds.
TIMEOUT_S = 2.0
_MOST_BYTES = 2**18


@dataclass(frozen=True)
class Reply:
    """What a metadata server answered.

    Args:
        url: What was asked for.
        status: Of HTTP.
        headers: Their names in any case.
        text: The body.
    """

    url: str
    status: int
    headers: Mapping[str, str]
    text: str

    def fields(self) -> dict[str, Any]:
        """The JSON object in the body of a good answer. Raises MetadataError."""
        if self.status != 200:
            raise self.is_not("status 200")
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise self.is_not("JSON") from error
        if not isinstance(found, dict):
            raise self.is_not("a JSON object")
        return found

    def is_not(self, expected: str) -> MetadataError:
        start = self.text[:100]
        return MetadataError(
            f"{self.url}: expected {expected}. Received: status {self.status} and {start!r}"
        )


def request(
    url: str, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S, method: str = "GET"
) -> Reply:
    """Asks a metadata server once.

    Args:
        url: Begins with `http://` and an IP address.
        headers: Of the request.
        timeout_s: From now to the last byte of the answer. Defaults to 2.
        method: Of HTTP. Defaults to `"GET"`.

    Raises:
        MetadataError: If there is no complete answer in time, or it is no HTTP or no text.
    """
    end_s = time.monotonic() + timeout_s
    address = parse_url(url)
    connection = HTTPConnection(address.host or "", address.port, timeout=timeout_s)
    try:
        connection.connect()
        with _cut(connection.sock, end_s):
            connection.request(method, address.request_uri, headers=headers, preload_content=False)
            response = connection.getresponse()
            body = b""
            while part := response.read(_MOST_BYTES, decode_content=False):
                body += part
                if len(body) > _MOST_BYTES:
                    raise MetadataError(f"{url}: expected no more than {_MOST_BYTES} bytes.")
        return Reply(url, response.status, response.headers, body.decode())
    except (HTTPError, http.client.HTTPException, OSError, UnicodeDecodeError) as error:
        late = f" within {timeout_s:g} s" if time.monotonic() >= end_s else ""
        raise MetadataError(f"{url}: no complete answer{late}. Cause: {error!r}") from error
    finally:
        connection.close()


@contextlib.contextmanager
def _cut(connected: socket.socket, end_s: float) -> Iterator[None]:
    """Breaks the connection at `end_s`. A socket's own time-out begins anew with each byte, so
    that a server which sends one now and then would keep us for ever."""
    is_late = threading.Event()
    # An own descriptor: that of `connected` may be closed, and be another file's, by then.
    with connected.dup() as line:

        def cut() -> None:
            is_late.set()
            with contextlib.suppress(OSError):  # the other side has broken it before
                line.shutdown(socket.SHUT_RDWR)

        watchdog = threading.Timer(end_s - time.monotonic(), cut)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()
            watchdog.join()
    if is_late.is_set():  # where the end of the connection ends the body, it looks complete
        raise TimeoutError("the connection was broken off")
