"""Processes that serve a chief: workers, which take steps, and parameter servers, which hold
variables.

TensorFlow's `Server` answers from threads of its own, and its `join` never returns. Here the main
thread waits in its place, so that a server ends by SIGTERM at once, and ends by itself where nobody
sends one: some time after the chief has gone for good.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.log import announce

PATIENCE = "KERAS_DISTPLUG_CHIEF_GONE_SECS"

_PATIENCE_S = 300.0  # a scheduler may start the chief again, with these servers
_LOOK_S = 1.0
_LEAST_THREADS = 4
_CONNECT_S = 1.0


def serve(
    cluster: Mapping[str, Sequence[str]], task_type: str, index: int, on_ready: Callable[[], None]
) -> None:
    """Serves until the end of the job, which is the end of this process: it never returns.

    Args:
        cluster: For each task type its addresses.
        task_type: `"worker"` or `"ps"`.
        index: The place among the tasks of this type.
        on_ready: Called once the server listens.

    Raises:
        ConfigurationError: If it cannot listen at its address.
    """
    patience_s = _patience_s()
    addresses = {task: list(of_type) for task, of_type in cluster.items()}
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(addresses),
            task_type,
            index,
            protocol="grpc",
            config=tf.compat.v1.ConfigProto(
                # A function that asks another task keeps a thread while it waits for the answer.
                inter_op_parallelism_threads=max(os.cpu_count() or 1, _LEAST_THREADS)
            ),
        )
    except tf.errors.OpError as error:
        raise ConfigurationError(
            f"{task_type}-{index} cannot listen at {addresses[task_type][index]}: {error.message}. "
            "Is another process there? Give each task a free port of its own machine."
        ) from error
    announce(f"{task_type}-{index} serves {addresses['chief'][0]}")
    on_ready()
    wait_for_end(addresses["chief"][0], patience_s)
    announce(f"{task_type}-{index} ends: the chief has been gone for {patience_s:g} s")
    del server  # it is here until now, and its own end may never come
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def wait_for_end(chief: str, patience_s: float) -> None:
    """Returns when nobody has listened at the address `chief` for so long, after somebody has.

    A machine that does not answer counts as one where nobody listens.
    """
    seen_s: float | None = None
    while True:
        if _listens(chief):
            seen_s = time.monotonic()
        elif seen_s is not None and time.monotonic() - seen_s >= patience_s:
            return
        time.sleep(_LOOK_S)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


def _patience_s() -> float:
    given = os.environ.get(PATIENCE)
    try:
        patience_s = _PATIENCE_S if given is None else float(given)
    except ValueError:
        patience_s = -1.0
    if not patience_s >= 0:
        raise ConfigurationError(
            f"Expected {PATIENCE} to be a number of seconds, at least 0: how long a worker or "
            f"parameter server goes on without the chief. Received: {given!r}"
        )
    return patience_s
