"""Whether the port of a task is free for TensorFlow."""

from __future__ import annotations

import contextlib
import errno
import socket
import time

from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ClusterError

_PATIENCE_SECS = 30.0  # for the process that was there before, which may be about to end
_PAUSE_SECS = 0.2


def require_free(role: Role, patience_secs: float = _PATIENCE_SECS) -> None:
    """Checks that this process can listen where the others expect it.

    Args:
        role: Of a task of a cluster.
        patience_secs: How long the port may be in use.

    Raises:
        ClusterError: If another process uses it.
    """
    address = role.cluster[role.task_type][role.index]
    port = int(address.rpartition(":")[2])
    end_s = time.monotonic() + patience_secs
    while (error := _error_at(port)) is not None:
        if time.monotonic() > end_s:
            raise ClusterError(
                f"{role.name} cannot listen on port {port}, which the other tasks expect it at "
                f"({address}, from {role.source}): {error.strerror}. Expected a port that no other "
                "process of this machine uses. End that process, or give this task another port "
                "in the cluster of every task."
            )
        time.sleep(_PAUSE_SECS)


def _error_at(port: int) -> OSError | None:
    """Why TensorFlow, which listens on all addresses of the machine, cannot; None if it can."""
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        with contextlib.closing(socket.socket(family)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", port))
            probe.listen(1)
    except OSError as error:
        return error if error.errno in (errno.EADDRINUSE, errno.EACCES) else None
    return None
