"""A local mock of a metadata server, with configurable answers and faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[["Mock", BaseHTTPRequestHandler], None]


class Mock:
    """Sends the answers configured for a request, such as `"GET /latest/api/token"`.

    It sends one answer after another and then repeats the last one. Other requests get a 404.

    Attributes:
        answers: Answers by request.
        asked: Requests received.
        headers: Headers of these requests.
        base_url: URL of the server.
        is_asked: Event set by every request.
        dripped: Number of bytes that `drip` has sent.
        may_end: Event that releases hanging answers.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.is_asked = threading.Event()
        self.may_end = threading.Event()
        self.dripped = 0
        self.base_url = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        what = f"{handler.command} {handler.path}"
        self.asked.append(what)
        self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        self.is_asked.set()
        answers = self.answers.get(what, [reply("not found", status=404)])
        (answers.pop(0) if len(answers) > 1 else answers[0])(self, handler)


def reply(body: str | bytes = "", status: int = 200, **headers: str) -> Answer:
    content = body.encode() if isinstance(body, str) else body

    def answer(mock: Mock, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def raw(content: bytes) -> Answer:
    """Sends `content` and closes the connection."""
    return lambda mock, handler: handler.wfile.write(content) and None


def silence(mock: Mock, handler: BaseHTTPRequestHandler) -> None:
    """Accepts the request and sends no answer."""
    mock.may_end.wait(60)


def drip(beginning: bytes) -> Answer:
    """Sends `beginning` and then a byte every now and then, forever."""

    def answer(mock: Mock, handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(beginning)
        while not mock.may_end.wait(0.005):
            try:
                handler.wfile.write(b"x")
            except OSError:
                return
            mock.dripped += 1

    return answer


@contextmanager
def serving() -> Iterator[Mock]:
    mock = Mock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            mock.answer(self)

        do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            return  # the client has disconnected

    server = Server(("127.0.0.1", 0), Handler)
    mock.base_url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield mock
    finally:
        mock.may_end.set()
        server.shutdown()
        server.server_close()
        thread.join(30)
