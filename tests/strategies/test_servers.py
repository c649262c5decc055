"""The end of a server's job."""

from __future__ import annotations

import socket
import threading
import time

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

from keras_distplug.core.errors import ConfigurationError  # noqa: E402
from keras_distplug.strategies import servers  # noqa: E402


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_POLL_S", 0.02)


def test_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server waits for a chief that has not started, continues as long as it is reachable or
    comes back in time, and ends after it has been unreachable for the allowed time."""
    looks = [False] * 50 + [True] + [False] * 3 + [True] + [False] * 1000
    seen = iter(looks)
    monkeypatch.setattr(servers, "_listens", lambda _: next(seen))
    servers.wait_for_end("chief:1", patience_s=0.3)
    used = len(looks) - len(list(seen))
    assert 55 < used < 300


def test_listens() -> None:
    """A listening port is reachable, a closed one is not."""
    with socket.create_server(("127.0.0.1", 0)) as chief:
        address = f"127.0.0.1:{chief.getsockname()[1]}"
        assert servers._listens(address)
    assert not servers._listens(address)


def test_chief_is_lost() -> None:
    """The wait ends after a chief with a real port has closed it."""
    chief = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{chief.getsockname()[1]}"
    waiting = threading.Thread(target=servers.wait_for_end, args=(address, 0.1), daemon=True)
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive()
    chief.close()
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.parametrize("given", ["soon", "-1", "nan"])
def test_patience(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """A value that is not a number of seconds is refused."""
    monkeypatch.setenv(servers.PATIENCE, given)
    with pytest.raises(ConfigurationError, match=servers.PATIENCE):
        servers.serve({"chief": ["a:1"], "ps": ["b:1"]}, "ps", 0, lambda: None)
