"""Which run a training belongs to."""

from __future__ import annotations

import os
import random
from typing import Any

from keras_distplug.cluster import roles
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ConfigurationError, CorruptCheckpointError
from keras_distplug.storage import runs
from keras_distplug.storage.files import Files


def find_or_begin_run(files: Files, *, resume: bool, job: str | None) -> runs.Run:
    """The run to go on with, or a new one.

    Args:
        files: The directory.
        resume: Whether to go on with the newest run that it holds.
        job: That of the supervisor which has started this process.
    """
    try:
        newest = runs.newest_run(files)
    except CorruptCheckpointError:
        if resume:
            raise
        newest = None
    # A supervisor starts the same script again: `resume=False` is meant for its first start.
    own = newest is not None and job is not None and newest.record.job == job
    if newest is not None and (resume or own):
        return newest
    # From a copy: a run that is begun draws no more than one that goes on.
    draws = random.Random()
    draws.setstate(random.getstate())
    return runs.begin_run(files, job=job, seed=draws.randrange(2**31))


def require_one_model(role: Role, strategy: Any) -> None:
    """Checks that workers of a cluster do not train separate models into one directory."""
    if role.world_size > 1 or "TF_CONFIG" not in os.environ:
        return
    described = roles.from_environment(os.environ)
    if described.world_size > 1:
        name = type(strategy).__name__
        under = "without a strategy" if name.startswith("_Default") else f"under {name}"
        raise ConfigurationError(
            "Expected a model under a multi-worker strategy, because TF_CONFIG has "
            f"{described.world_size} workers. Received: a model {under}, so "
            "that every worker would train a separate model into the same directory. Call "
            "`kd.distributed_fit`, or make and compile the model within `kd.init().scope()`."
        )
