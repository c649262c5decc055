"""Ports on which TensorFlow will listen."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from keras_distplug.cluster import ports
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ClusterError


def role_at(port: int) -> Role:
    return Role("worker", 1, {"worker": ("a:1", f"127.0.0.1:{port}")}, "TF_CONFIG")


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "")]
)
def test_in_use(family: socket.AddressFamily, host: str) -> None:
    """A port on which another process listens is named, with the task, whichever address it is."""
    with closing(socket.create_server((host, 0), family=family, reuse_port=True)) as other:
        port = other.getsockname()[1]
        complaint = rf"worker-1 cannot listen on port {port},.*\(127.0.0.1:{port}, from TF_CONFIG\)"
        with pytest.raises(ClusterError, match=complaint):
            ports.require_free(role_at(port), patience_secs=0.0)
    ports.require_free(role_at(port), patience_secs=0.0)


def test_port_that_becomes_free() -> None:
    """The wait covers a process that is about to exit."""
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    threading.Timer(0.3, other.close).start()
    ports.require_free(role_at(port), patience_secs=20.0)
