"""Which run a training belongs to."""

from __future__ import annotations

import os
import random
from typing import Any

from keras_distplug.cluster import roles
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ConfigurationError, CorruptCheckpointError
from keras_distplug.core.log import announce
from keras_distplug.storage import runs
from keras_distplug.storage.files import Files

finished_here: dict[tuple[int, str], runs.Run] = {}


def note_finished(files: Files, run: runs.Run) -> None:
    """Notes that a `fit` of this process has finished a run: its next one gets the run after it."""
    finished_here[_key(files)] = run


def find_or_begin_run(files: Files, *, resume: bool, job: str | None) -> runs.Run:
    """Returns the run to continue, or a new one.

    Within a process, every `fit` that follows a finished one has a run of its own, next to those
    of the earlier ones. Another process that runs the same script gets the same runs in the same
    order.

    Args:
        files: The directory.
        resume: Whether to continue a run that it holds.
        job: That of the supervisor which has started this process.
    """
    before = finished_here.get(_key(files))
    if before is not None:
        return runs.next_of(files, before) or _begin(files, job, before.record.place + 1)
    try:
        newest = runs.newest_run(files)
        first = newest and runs.first_of(files, newest)
    except CorruptCheckpointError:
        if resume:
            raise
        newest = first = None
    # A supervisor starts the same script again: `resume=False` is meant for its first start.
    own = newest is not None and job is not None and newest.record.job == job
    if newest is None or not (resume or own):
        return _begin(files, job, 1)
    if first is None:
        announce(
            f"{files.where(newest.name)} is the run of fit number {newest.record.place} of a "
            "script, whose earlier runs are gone, so it cannot be continued: starting from the "
            "beginning. Pass delete_checkpoint=False to keep them"
        )
        return _begin(files, job, 1)
    return first


def _begin(files: Files, job: str | None, place: int) -> runs.Run:
    # From a copy: a run that is begun draws no more than one that goes on.
    draws = random.Random()
    draws.setstate(random.getstate())
    return runs.begin_run(files, job=job, seed=draws.randrange(2**31), place=place)


def _key(files: Files) -> tuple[int, str]:
    return os.getpid(), files.where()


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
