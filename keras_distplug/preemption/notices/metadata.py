"""Sends a request to a cloud's metadata server, in bounded time whatever the server does.

A request must reach this machine's own metadata server or none at all. Therefore it uses a single
connection of urllib3, which ignores proxies in the environment, and neither follows redirects nor
retries.
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

# The address on AWS, Google and Azure. Not a host name, because name resolution has no timeout.
ADDRESS = "http://169.254.169.254"
# The server is on the same host and answers within milliseconds.
TIMEOUT_S = 2.0
_MAX_BYTES = 2**18


@dataclass(frozen=True)
class Reply:
    """The response of a metadata server.

    Args:
        url: Requested URL.
        status: HTTP status.
        headers: HTTP headers, with case-insensitive names.
        text: Body of the response.
    """

    url: str
    status: int
    headers: Mapping[str, str]
    text: str

    def fields(self) -> dict[str, Any]:
        """Returns the JSON object in the body of a successful response. Raises MetadataError."""
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
            f"{self.url}: expected {expected}. Received: status {self.status}; the first 100 "
            f"characters of the body: {start!r}"
        )


def request(
    url: str, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S, method: str = "GET"
) -> Reply:
    """Sends one request to a metadata server.

    Args:
        url: URL with `http://` and an IP address.
        headers: HTTP headers of the request.
        timeout_s: Timeout of the complete response, in seconds. Defaults to 2.
        method: HTTP method. Defaults to `"GET"`.

    Raises:
        MetadataError: If the response is not complete in time, not HTTP, or not text.
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
            while part := response.read(_MAX_BYTES, decode_content=False):
                body += part
                if len(body) > _MAX_BYTES:
                    raise MetadataError(
                        f"{url}: expected at most {_MAX_BYTES} bytes. Received: a longer response"
                    )
        return Reply(url, response.status, response.headers, body.decode())
    except (HTTPError, http.client.HTTPException, OSError, UnicodeDecodeError) as error:
        late = f" within {timeout_s:g} s" if time.monotonic() >= end_s else ""
        # Its `repr` would contain the body.
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else repr(error)
        raise MetadataError(f"{url}: no valid response{late}. Cause: {why}") from error
    finally:
        connection.close()


@contextlib.contextmanager
def _cut(connected: socket.socket, end_s: float) -> Iterator[None]:
    """Breaks the connection at `end_s`.

    A socket's own timeout restarts with every byte, so a server could delay us forever.
    """
    is_late = threading.Event()
    # A duplicate: by then, the descriptor of `connected` may be closed and reused for a file.
    with connected.dup() as line:

        def cut() -> None:
            is_late.set()
            with contextlib.suppress(OSError):  # the server may have closed it already
                line.shutdown(socket.SHUT_RDWR)

        watchdog = threading.Timer(end_s - time.monotonic(), cut)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()
            watchdog.join()
    if is_late.is_set():  # a body that extends to the end of the connection looks complete
        raise TimeoutError("the connection was cut")
