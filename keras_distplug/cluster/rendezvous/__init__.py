"""Workers meet before TensorFlow connects them.

TensorFlow waits up to an hour for missing workers, without naming them, and ignores SIGTERM and
Ctrl-C meanwhile. So every worker first connects to the chief, at the address and port where
TensorFlow will listen afterwards. The chief waits until all have connected, checks that they agree
on the cluster and run the same versions, and that their addresses lead to them. A worker that fails
before that reports why, and all others end with its error.

A worker or chief that skips this, because its script makes the strategy itself, is recognized by
the first bytes of gRPC: then TensorFlow does the waiting.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict

from keras_distplug.cluster import ports
from keras_distplug.cluster.rendezvous.chief import Chief
from keras_distplug.cluster.rendezvous.messages import (
    PAUSE_SECS,
    Hello,
    Stranger,
    TensorFlowWaits,
    connect,
    connect_interruptibly,
    get_address,
    get_reason,
    receive,
    send,
)
from keras_distplug.cluster.rendezvous.others import attend
from keras_distplug.cluster.rendezvous.waiting import Waiting, farewell_secs, limit_secs
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ClusterError

_met: list[Hello] = []


def meet(role: Role, versions: Mapping[str, str]) -> None:
    """Waits until all workers of a cluster have started. The chief must call it, too.

    Args:
        role: The role of this process, which trains together with others.
        versions: The versions of the packages that must agree on all workers, by name.

    Raises:
        ClusterError: If the port is in use, the workers differ in cluster or versions, or an
            address does not lead to its worker.
        PeerLostError: If a worker failed before it joined, or did not join in time
            (KERAS_DISTPLUG_JOIN_TIMEOUT, in seconds; an hour).
    """
    waiting = Waiting(role, limit_secs())
    hello = Hello.of(role, versions)
    try:
        listener = ports.listen(role)
    except ClusterError as error:
        report_failure(role, str(error))
        raise
    finally:
        _met.append(hello)  # from now on, the chief's answer reaches all workers
    with listener, contextlib.suppress(TensorFlowWaits):
        if role.is_chief:
            Chief(role, hello, listener, waiting).gather()
        else:
            attend(role, hello, listener, waiting)


def has_met() -> bool:
    """Returns whether this process has called `meet`, which reports its own errors."""
    return bool(_met)


def report_failure(role: Role, error: str) -> None:
    """Ends the workers that wait for this process, and shows them its error. Waits briefly for
    workers that have not started yet.

    Args:
        role: The role of this process, which will not join.
        error: The error, in one line.
    """
    hello = Hello.of(role, {}, error)
    end_s = time.monotonic() + farewell_secs(role)
    with contextlib.suppress(OSError, ClusterError, TensorFlowWaits, Stranger):
        if not role.is_chief:
            with contextlib.closing(_connect_until(role, end_s)) as chief:
                send(chief, asdict(hello))
                next(receive(chief, end_s), None)
            return
        with ports.listen(role, patience_secs=0.0) as listener:
            waiting = Waiting(role, farewell_secs(role))
            Chief(role, hello, listener, waiting).fail()


def _connect_until(role: Role, end_s: float) -> socket.socket:
    while True:
        try:
            return connect(get_address(role, 0))
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(PAUSE_SECS)


def await_servers(role: Role) -> None:
    """Waits until all workers and parameter servers of a chief listen.

    Args:
        role: The role of the chief of a cluster with parameter servers.

    Raises:
        PeerLostError: If one does not start in time (KERAS_DISTPLUG_JOIN_TIMEOUT).
    """
    waiting = Waiting(role, limit_secs())
    for task in ("ps", "worker"):
        for index, address in enumerate(role.cluster[task]):
            while True:
                try:
                    connect_interruptibly(address).close()
                    break
                except OSError as error:
                    waiting.on(f"{task}-{index} ({address})", get_reason(error))
                time.sleep(PAUSE_SECS)
