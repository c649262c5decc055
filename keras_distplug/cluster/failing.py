"""Finds out whether an error that ends this process comes from another worker.

An error outside `fit`, such as one while a model is built, may follow from the loss of another
worker. If the error is this process's own, the other workers are notified and end, too. They would
otherwise notice later, or wait for a worker that never joins.
"""

from __future__ import annotations

import os
import sys

from keras_distplug.cluster import leaving, rendezvous, roles
from keras_distplug.core.errors import ClusterError
from keras_distplug.core.supervised import Supervised

_PROCESS = "KERAS_DISTPLUG_PROCESS"  # the worker itself, not its subprocesses


class _Prepared:
    pid: int | None = None


def prepare() -> None:
    """Prepares a worker of a cluster. Call it when the package is imported."""
    _Prepared.pid = os.getpid()
    os.environ.setdefault(_PROCESS, str(os.getpid()))
    leaving.consult(code_after)
    leaving.prepare()


def code_after(error: Exception) -> int | None:
    """Returns the exit code for `error`, or None to keep it, and notifies the other workers."""
    try:
        role = roles.from_environment(os.environ)
    except ClusterError:
        return None
    if role.world_size == 1 or role.name not in role.workers:  # an evaluator
        return None
    if "tensorflow" in sys.modules and os.getpid() == _Prepared.pid:  # no fork
        from keras_distplug.cluster import peers  # loads TensorFlow

        if peers.has_joined():
            return peers.code_after(error, role)
    is_task = os.environ.get(_PROCESS) == str(os.getpid())
    if is_task and Supervised.from_env() is None and not rendezvous.has_met():
        rendezvous.report_failure(role, f"{type(error).__name__}: {error}")
    return None
