"""The port of this process in its cluster."""

from __future__ import annotations

import errno
import socket
import time

from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ClusterError

_PATIENCE_SECS = 15.0  # a process of an earlier start may be about to exit
_PAUSE_SECS = 0.2
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def require_free(role: Role, patience_secs: float = _PATIENCE_SECS) -> None:
    """Checks that this process can listen at its address. Arguments and errors are those of
    `listen`."""
    listen(role, patience_secs).close()


def listen(role: Role, patience_secs: float = _PATIENCE_SECS) -> socket.socket:
    """Listens on this process's port, on all addresses of the machine, as TensorFlow does.

    Args:
        role: The role of this process in a cluster.
        patience_secs: Seconds for which the port may be in use. Defaults to 15.

    Raises:
        ClusterError: If another process uses the port.
    """
    address = role.cluster[role.task_type][role.index]
    port = int(address.rpartition(":")[2])
    end_s = time.monotonic() + patience_secs
    while True:
        try:
            return _listen(port)
        except OSError as error:
            if time.monotonic() > end_s:
                raise ClusterError(
                    f"{role.name} cannot listen on port {port}, where the other tasks expect it "
                    f"({address}, from {role.source}): {error.strerror}. If another process "
                    "uses this port, stop it; otherwise, give this task another port in the "
                    "cluster definition of every task."
                ) from None
        time.sleep(_PAUSE_SECS)


def _listen(port: int) -> socket.socket:
    try:
        return _listen_on(socket.AF_INET6, port)
    except OSError as error:
        if error.errno not in _NO_IPV6:
            raise
    return _listen_on(socket.AF_INET, port)


def _listen_on(family: socket.AddressFamily, port: int) -> socket.socket:
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener
