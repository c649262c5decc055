"""Finds the run that a training job belongs to."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import keras

from keras_distplug.checkpoint import changed_settings, compilation, same_run
from keras_distplug.cluster import roles
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
    OtherRunError,
)
from keras_distplug.core.log import announce
from keras_distplug.storage import layout, runs
from keras_distplug.storage.files import Files
from keras_distplug.storage.store import CheckpointStore, Stored


@dataclass(frozen=True)
class Finished:
    """The `fit` that this process has finished most recently in a directory.

    Args:
        run: The run of that `fit`.
        has_trained: False if it only returned what another process had trained.
        is_deleted: True if the run was deleted at the end.
    """

    run: runs.Run
    has_trained: bool
    is_deleted: bool


finished_here: dict[tuple[int, str], Finished] = {}


def note_finished(files: Files, run: runs.Run, has_trained: bool, is_deleted: bool) -> None:
    """Records a finished `fit` of this process: its next one gets the run after that."""
    finished_here[_key(files)] = Finished(run, has_trained, is_deleted)


def run_of_model(files: Files, model: keras.Model, data: Mapping[str, str], **how: Any) -> runs.Run:
    """Calls `find_or_start_run` with the identity and settings of a model and its data."""
    identity, settings = same_run.compute_identity(model, data), compilation.get_settings(model)
    return find_or_start_run(files, identity, settings=settings, **how)


def find_or_start_run(
    files: Files,
    identity: runs.Identity,
    *,
    resume: bool,
    job: str | None,
    is_shared: bool = False,
    settings: Mapping[str, Any] = MappingProxyType({}),
    world_size: int = 1,
) -> runs.Run:
    """Returns the run to continue, or a new one.

    Within a process, every `fit` that follows a finished one has its own run, after those of the
    earlier ones. Another process that runs the same script gets the same runs in the same order.
    If it skips some of them, it gets the one that trains the same model and data.

    Args:
        files: The directory.
        identity: The identity of the model and data in training.
        resume: True to continue an existing run.
        job: The job of the supervisor that started this process, if any.
        is_shared: True if the directory may hold runs of other models and data, so that a new run
            starts after a finished one of these.
        settings: The model's settings, from `compilation.get_settings`.
        world_size: The number of workers.
    """
    opening = _Opening(files, identity, job, is_shared, settings, world_size)
    before = finished_here.get(_key(files))
    if before is not None and _is_known(files, before):
        return _next(opening, before, resume=resume)
    try:
        newest = runs.newest_run(files)
        sequence = runs.get_sequence(files, newest) if newest else {}
    except CorruptCheckpointError:
        if resume:
            raise
        newest, sequence = None, {}
    if newest is None or not (resume or _has_job(newest, job)):
        return opening.start()
    if 1 not in sequence:
        announce(
            f"{files.where(newest.name)} is the run of `fit` call number {newest.record.place} of "
            "a script, but the runs of its earlier `fit` calls no longer exist, so it cannot be "
            "continued: starting from scratch. By default, the run of a finished `fit` is "
            "deleted; to keep it, pass delete_checkpoint=False to BackupAndRestore"
        )
        return opening.start()
    return opening.choose(sequence, 1)


@dataclass(frozen=True)
class _Opening:
    files: Files
    identity: runs.Identity
    job: str | None
    is_shared: bool
    settings: Mapping[str, Any]
    world_size: int

    def choose(
        self, sequence: Mapping[int, runs.Run], place: int, *, has_trained: bool = False
    ) -> runs.Run:
        """Returns the run at `place`, unless another run certainly matches better.

        Args:
            sequence: The runs of the script's `fit` calls by their places.
            place: The place of this call.
            has_trained: True if the previous call has trained: later runs continued an older state.
        """
        expected = sequence[place]
        may_be = expected.record.identity.may_be(self.identity)
        later = [
            run
            for number, run in sequence.items()
            if number > place and run.record.identity.is_surely(self.identity)
        ]
        if may_be and (
            not later or has_trained or not self._differs_in_settings(expected, strict=True)
        ):
            return expected
        found = next(filter(self._matches_settings, later), None)
        if found is None and may_be and self._differs_in_settings(expected):
            found = next((run for run in later if not layout.places(self.files, run.name)), None)
        if found is None and not may_be and later:
            found = later[0]
        if found is not None:
            skipped = found.record.place - place
            calls = "1 `fit` call" if skipped == 1 else f"{skipped} `fit` calls"
            announce(
                f"using {self.files.where(found.name)}, the run of this model and this data; this "
                f"time, the script did not make the {calls} that came before"
            )
            return found
        last = sequence[max(sequence)]
        if may_be or not self.is_shared:
            return expected
        if (earlier := self._earlier_run(sequence.values())) is not None:
            announce(
                f"using {self.files.where(earlier.name)}, the run of this model and this data; "
                "newer runs in the directory belong to different models or different data"
            )
            return earlier
        if not _is_finished(self.files, last) and layout.places(self.files, last.name):
            if last is expected:
                return last  # its checkpoint's error names the difference
            raise OtherRunError(
                f"{self.files.where(last.name)} is an interrupted run of a different model or "
                "different data. Give this run a separate directory, or pass "
                "resume=False to start a new run next to the old one. Nothing was changed."
            )
        announce(
            f"{self.files.where(last.name)} belongs to a different model or different data; "
            "starting a new run"
        )
        return self.start(last)

    def _has_same_settings(self, stored: Stored, *, strict: bool = False) -> bool:
        manifest = stored.manifest
        there = compilation.start_settings(manifest.how_built)
        return not changed_settings.training_changes(
            changed_settings.compare(there, self.settings),
            {} if strict else manifest.history,
            is_same_size=manifest.world_size == self.world_size,
        )

    def _differs_in_settings(self, run: runs.Run, *, strict: bool = False) -> bool:
        """Returns True if `run` is finished, and was trained with other hyperparameters.

        Args:
            run: The run.
            strict: True if a learning rate that it reached during training counts as different.
        """
        stored = self._newest(run, "final")
        return stored is not None and not self._has_same_settings(stored, strict=strict)

    def _matches_settings(self, run: runs.Run) -> bool:
        """Returns True if `run` has a checkpoint trained with exactly these hyperparameters."""
        stored = self._newest(run, "final") or self._newest(run, "step")
        return stored is not None and self._has_same_settings(stored, strict=True)

    def _newest(self, run: runs.Run, kind: layout.Kind) -> Stored | None:
        with contextlib.suppress(CheckpointError):  # resuming from it reports that
            return CheckpointStore(self.files, run.name).newest(kind)
        return None

    def _earlier_run(self, newer: Iterable[runs.Run]) -> runs.Run | None:
        """Returns the newest run with a checkpoint that certainly has this identity."""
        skipped = {run.name for run in newer}
        for _, name in reversed(layout.runs(self.files)):
            if name in skipped or layout.RECORD not in layout.names(self.files, name):
                continue
            with contextlib.suppress(CorruptCheckpointError):
                run = runs.read_run(self.files, name)
                is_same = run.record.identity.is_surely(self.identity)
                if not is_same or self._differs_in_settings(run):
                    continue
                if layout.places(self.files, name):
                    return run
        return None

    def start(self, after: runs.Run | None = None) -> runs.Run:
        # Draws from a copy: starting a run must not draw more numbers than resuming one.
        draws = random.Random()
        draws.setstate(random.getstate())
        seed = draws.randrange(2**31)
        return runs.create_run(
            self.files, job=self.job, seed=seed, after=after, identity=self.identity
        )


def _is_known(files: Files, before: Finished) -> bool:
    """Returns False if the run was deleted from outside since."""
    return before.is_deleted or layout.RECORD in layout.names(files, before.run.name)


def _next(opening: _Opening, before: Finished, *, resume: bool) -> runs.Run:
    files = opening.files
    sequence = runs.get_sequence(files, before.run)
    place = before.run.record.place + 1
    # The number of a deleted run is reused for the next one.
    if place not in sequence or not (resume or _has_job(sequence[place], opening.job)):
        return opening.start(before.run)
    found = opening.choose(sequence, place, has_trained=before.has_trained)
    if before.has_trained and found is sequence[place] and _is_finished(files, found):
        announce(
            f"{files.where(found.name)} is the finished run of this `fit` call, but "
            f"{before.run.name}, which precedes it, has been trained further since: starting a new "
            "run for this `fit` call"
        )
        return opening.start(before.run)
    return found


def _has_job(run: runs.Run, job: str | None) -> bool:
    """Returns True if the same supervisor job started `run`: `resume=False` affects only the job's
    first start."""
    return job is not None and run.record.job == job


def _is_finished(files: Files, run: runs.Run) -> bool:
    return any(
        place.kind == "final" and layout.MANIFEST in layout.names(files, f"{run.name}/{place.name}")
        for place in layout.places(files, run.name)
    )


def _key(files: Files) -> tuple[int, str]:
    return os.getpid(), files.where()


def require_one_model(role: Role, strategy: Any) -> None:
    """Checks that workers of a cluster do not train separate models in one directory."""
    if role.world_size > 1 or "TF_CONFIG" not in os.environ:
        return
    described = roles.from_environment(os.environ)
    if described.world_size > 1:
        name = type(strategy).__name__
        under = "without a strategy" if name.startswith("_Default") else f"under {name}"
        raise ConfigurationError(
            "Expected a model created under a multi-worker strategy, because TF_CONFIG lists "
            f"{described.world_size} workers. Received: a model {under}; every worker would train "
            "a separate model in the same directory. Call `keras_distplug.distributed_fit`, or "
            "create and compile the model within `keras_distplug.init().scope()`."
        )
