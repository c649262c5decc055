"""Processes that serve a chief: workers, which run steps, and parameter servers, which hold
variables.

TensorFlow's `Server` answers from its own threads, and its `join` never returns. Here the main
thread waits instead, so that a server exits immediately on SIGTERM. Without a signal, it exits on
its own some time after the chief has disappeared for good.
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

_PATIENCE_S = 300.0  # a scheduler may restart the chief and reuse these servers
_POLL_S = 1.0
_LEAST_THREADS = 4
_CONNECT_S = 1.0


def serve(
    cluster: Mapping[str, Sequence[str]], task_type: str, index: int, on_ready: Callable[[], None]
) -> None:
    """Serves until the job ends, and then exits the process: this function never returns.

    Args:
        cluster: The addresses of every task, by task type.
        task_type: `"worker"` or `"ps"`.
        index: The task's index among those of its type.
        on_ready: Called once the server is listening.

    Raises:
        ConfigurationError: If the server cannot listen on its address.
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
                # A function that calls another task blocks a thread until the answer arrives.
                inter_op_parallelism_threads=max(os.cpu_count() or 1, _LEAST_THREADS)
            ),
        )
    except tf.errors.OpError as error:
        raise ConfigurationError(
            f"{task_type}-{index} cannot listen on {addresses[task_type][index]}: {error.message}. "
            "Is the port already in use? Give every task a free port on its own machine."
        ) from error
    announce(f"{task_type}-{index} is ready and serves the chief at {addresses['chief'][0]}")
    on_ready()
    wait_for_end(addresses["chief"][0], patience_s)
    announce(f"{task_type}-{index} exits: the chief has been unreachable for {patience_s:g} s")
    del server  # kept alive until now; its own shutdown may never finish
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def wait_for_end(chief: str, patience_s: float) -> None:
    """Returns once the address `chief` has been unreachable for `patience_s` seconds.

    The time counts from the last successful connection, so a chief that has never been reached is
    waited for indefinitely. A machine that does not answer counts as unreachable.
    """
    reached_s: float | None = None
    while True:
        if _listens(chief):
            reached_s = time.monotonic()
        elif reached_s is not None and time.monotonic() - reached_s >= patience_s:
            return
        time.sleep(_POLL_S)


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
            f"Expected {PATIENCE} to be a number of seconds, at least 0: the time after which a "
            f"worker or parameter server exits if the chief is unreachable. Received: {given!r}"
        )
    return patience_s
