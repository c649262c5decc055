"""Which run a training belongs to."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

from keras_distplug.cluster import roles
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ConfigurationError, CorruptCheckpointError
from keras_distplug.core.log import announce
from keras_distplug.storage import layout, runs
from keras_distplug.storage.files import Files


@dataclass(frozen=True)
class Finished:
    """The `fit` that this process has finished last in a directory.

    Args:
        run: Its run.
        has_trained: False if it only returned what another process had trained.
        is_deleted: Whether its run was deleted then.
    """

    run: runs.Run
    has_trained: bool
    is_deleted: bool


finished_here: dict[tuple[int, str], Finished] = {}


def note_finished(files: Files, run: runs.Run, has_trained: bool, is_deleted: bool) -> None:
    """Notes what a `fit` of this process has finished: its next one gets the run after that."""
    finished_here[_key(files)] = Finished(run, has_trained, is_deleted)


def find_or_begin_run(files: Files, *, resume: bool, job: str | None) -> runs.Run:
    """Returns the run to continue, or a new one.

    Within a process, every `fit` that follows a finished one has its own run, after those of the
    earlier ones. Another process that runs the same script gets the same runs in the same order.

    Args:
        files: The directory.
        resume: Whether to continue a run that it holds.
        job: That of the supervisor which has started this process.
    """
    before = finished_here.get(_key(files))
    if before is not None and _is_known(files, before):
        return _next(files, before, resume=resume, job=job)
    try:
        newest = runs.newest_run(files)
        first = newest and runs.first_of(files, newest)
    except CorruptCheckpointError:
        if resume:
            raise
        newest = first = None
    if newest is None or not (resume or _is_of(newest, job)):
        return _begin(files, job)
    if first is None:
        announce(
            f"{files.where(newest.name)} is the run of fit number {newest.record.place} of a "
            "script, whose earlier runs are gone, so it cannot be continued: starting from the "
            "beginning. Pass delete_checkpoint=False to keep them"
        )
        return _begin(files, job)
    return first


def _is_known(files: Files, before: Finished) -> bool:
    """False if somebody has deleted the run since."""
    return before.is_deleted or layout.RECORD in layout.names(files, before.run.name)


def _next(files: Files, before: Finished, *, resume: bool, job: str | None) -> runs.Run:
    found = runs.next_of(files, before.run)
    if found is None or not (resume or _is_of(found, job)):
        return _begin(files, job, before.run)
    if before.has_trained and _is_finished(files, found):
        announce(
            f"{files.where(found.name)} is the run of this fit, but continued from an earlier "
            f"state of {before.run.name}, which has been trained since: starting this fit from "
            "the beginning"
        )
        return _begin(files, job, before.run)
    return found


def _is_of(run: runs.Run, job: str | None) -> bool:
    """A supervisor starts the same script again: `resume=False` is meant for its first start."""
    return job is not None and run.record.job == job


def _is_finished(files: Files, run: runs.Run) -> bool:
    return any(
        place.kind == "final" and layout.MANIFEST in layout.names(files, f"{run.name}/{place.name}")
        for place in layout.places(files, run.name)
    )


def _begin(files: Files, job: str | None, after: runs.Run | None = None) -> runs.Run:
    # From a copy: a run that is begun draws no more than one that goes on.
    draws = random.Random()
    draws.setstate(random.getstate())
    return runs.begin_run(files, job=job, seed=draws.randrange(2**31), after=after)


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
