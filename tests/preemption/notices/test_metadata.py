"""A single request, however the server behaves."""

from __future__ import annotations

import socket

import pytest
from mock_metadata import Answer, Mock, drip, raw, reply, silence
from support.cluster import free_ports

from keras_distplug.core.errors import MetadataError
from keras_distplug.preemption.notices.metadata import request

pytestmark = pytest.mark.timeout(30)
HEAD = b"HTTP/1.1 200 OK\r\n"


def test_reply(mock: Mock) -> None:
    """The response is returned, even an HTTP error; header names are case-insensitive."""
    mock.answers["PUT /a?b=c"] = [reply("it is ä", status=503, Some_Header="x")]
    found = request(f"{mock.base_url}/a?b=c", {"Asked-By": "us"}, 20, method="PUT")
    assert (found.status, found.text, found.headers["some-header"]) == (503, "it is ä", "x")
    assert mock.headers[0]["asked-by"] == "us"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(silence, id="silence"),
        pytest.param(drip(b""), id="status line"),
        pytest.param(drip(HEAD + b"A: "), id="header"),
        pytest.param(drip(HEAD + b"Content-Length: 9999\r\n\r\n"), id="body"),
        pytest.param(drip(HEAD + b"\r\n"), id="body without a length"),
        pytest.param(drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\nfff\r\n"), id="chunk"),
    ],
)
def test_endless_response(answer: Answer, mock: Mock) -> None:
    """A silent or slow server causes a timeout, and its partial response is discarded."""
    mock.answers["GET /"] = [answer]
    with pytest.raises(MetadataError, match=r"no valid response within 0\.5 s"):
        request(f"{mock.base_url}/", {}, 0.5)
    assert mock.asked == ["GET /"]
    assert answer is silence or mock.dripped > 3


def test_connection_not_accepted() -> None:
    """A machine that does not accept the connection causes a timeout, too."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for each in (first, second):
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        with pytest.raises(MetadataError, match=r"within 0\.3 s.*ConnectTimeoutError"):
            request(f"http://127.0.0.1:{full.getsockname()[1]}/", {}, 0.3)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"<html>hello</html>\r\n\r\n", id="no HTTP"),
        pytest.param(HEAD + b"Content-Length: 9\r\n\r\nabc", id="cut body"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc", id="bad chunk"),
        pytest.param(HEAD + b"Content-Length: 1\r\n\r\n\xff", id="no text"),
        pytest.param(HEAD + b"A: b\r\n" * 200 + b"\r\n", id="many headers"),
    ],
)
def test_garbage(content: bytes, mock: Mock) -> None:
    """An incomplete or malformed response is an error that names the URL."""
    mock.answers["GET /key"] = [raw(content)]
    with pytest.raises(MetadataError, match=f"{mock.base_url}/key: no valid response. Cause"):
        request(f"{mock.base_url}/key", {}, 20)
    assert mock.asked == ["GET /key"]


def test_flood(mock: Mock) -> None:
    """A long body is not read to the end."""
    mock.answers["GET /"] = [reply(b"x" * 2**20)]
    with pytest.raises(MetadataError, match="at most 262144 bytes"):
        request(f"{mock.base_url}/", {}, 20)


def test_connection_refused() -> None:
    with pytest.raises(MetadataError, match=r"no valid response. Cause: .*refused"):
        request(f"http://127.0.0.1:{free_ports(1)[0]}/", {}, 20)


def test_redirect(mock: Mock) -> None:
    """Redirects are not followed, because a metadata server sends none."""
    mock.answers["GET /"] = [reply(status=302, Location=f"{mock.base_url}/elsewhere")]
    mock.answers["GET /elsewhere"] = [reply("{}")]
    found = request(f"{mock.base_url}/", {}, 20)
    assert found.status == 302
    assert mock.asked == ["GET /"]
    with pytest.raises(MetadataError, match=r"expected status 200. Received: status 302"):
        found.fields()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_proxy_of_the_environment(name: str, mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes directly to the server, even if the environment names a proxy."""
    for exception in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(exception, raising=False)
    monkeypatch.setenv(name, f"http://127.0.0.1:{free_ports(1)[0]}")
    mock.answers["GET /"] = [reply("itself")]
    assert request(f"{mock.base_url}/", {}, 20).text == "itself"


@pytest.mark.parametrize("body", ["", "<html></html>", '{"a": ', "[" * 100_000, "[1]", "null"])
def test_fields(body: str, mock: Mock) -> None:
    """A body that is not a JSON object is an error that quotes its start."""
    mock.answers["GET /"] = [reply(body)]
    with pytest.raises(MetadataError, match=r"expected (a )?JSON.* Received: status 200"):
        request(f"{mock.base_url}/", {}, 20).fields()
