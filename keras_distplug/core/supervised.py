"""What a supervisor and the workers it started tell each other.

A few environment variables one way, one small file per worker the other way.

Standard library only: the supervisor and every worker import this before TensorFlow.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOB = "KERAS_DISTPLUG_JOB"
ATTEMPT = "KERAS_DISTPLUG_ATTEMPT"
STATUS_DIR = "KERAS_DISTPLUG_STATUS_DIR"
DEVICES_PER_WORKER = "KERAS_DISTPLUG_DEVICES_PER_WORKER"
JOINED_BY = "KERAS_DISTPLUG_JOINED_BY"  # the process that joins; its own subprocesses do not
FORK_SERVER = "KERAS_DISTPLUG_FORK_SERVER"  # in the fork server: what scripts set, as JSON


class Phase(enum.StrEnum):
    """How far a worker has come. A worker reports each phase as it reaches it."""

    JOINED = "joined"  # the cluster is formed
    FITTING = "fitting"  # `fit` has begun, no batch is done yet
    TRAINING = "training"  # the first batch of this attempt is done
    PREEMPTED = "preempted"  # told to go, behind a checkpoint of this attempt
    HUNG = "hung"  # training did not get on
    REFUSED = "refused"  # what it was given cannot be trained, however often it is started
    COMPLETED = "completed"  # the last `fit` reached its end and recorded it


@dataclass(frozen=True)
class Status:
    """One worker's report.

    Args:
        phase: How far it has come.
        since: For each phase reached, `time.time()` of that moment.
        why: What there is to say of the last one.
    """

    phase: Phase
    since: Mapping[Phase, float]
    why: str = ""


@dataclass(frozen=True)
class Supervised:
    """The contract between a supervisor and one worker.

    Args:
        job: The same for all attempts of one `keras-distplug run`.
        attempt: 0 for the first start, one more for each restart.
        status_dir: Where workers report. A new folder for each attempt.
        devices_per_worker: Devices each worker uses; None leaves that to TensorFlow.
    """

    job: str
    attempt: int
    status_dir: Path
    devices_per_worker: int | None = None

    def to_env(self) -> dict[str, str]:
        env = {JOB: self.job, ATTEMPT: str(self.attempt), STATUS_DIR: str(self.status_dir)}
        if self.devices_per_worker is not None:
            env[DEVICES_PER_WORKER] = str(self.devices_per_worker)
        return env

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Supervised | None:
        """The contract this process was started under, or None if nobody supervises it."""
        if JOB not in environ:
            return None
        devices = environ.get(DEVICES_PER_WORKER)
        return cls(
            job=environ[JOB],
            attempt=int(environ[ATTEMPT]),
            status_dir=Path(environ[STATUS_DIR]),
            devices_per_worker=int(devices) if devices else None,
        )

    def report(self, worker: str, phase: Phase, why: str = "") -> None:
        """Records that `worker` (`"worker-1"`) has reached `phase`.

        A report that cannot be written is a warning: training has not failed. Without the last one
        the supervisor starts the job again, which then finds itself finished.
        """
        before = self.read(worker)
        since = {**(before.since if before else {}), phase: time.time()}
        _replace(
            self._path(worker),
            {"phase": phase, "since": since, "why": why},
            f"{worker} could not tell its supervisor that it is {phase}",
        )

    def saved(self, run: str, step: int) -> None:
        """Records that there is a checkpoint. From any thread, of the chief.

        Args:
            run: Where it is.
            step: Steps since the run began.
        """
        try:
            self.status_dir.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"run": run, "step": step}) + "\n"
            # In one piece: local checkpoints and others may be complete at the same moment.
            file = os.open(self._saves, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)
        except OSError as error:
            warnings.warn(
                f"The supervisor could not be told of the checkpoint of step {step}: {error}",
                stacklevel=2,
            )

    def newest_saves(self) -> dict[str, int]:
        """The step of the newest checkpoint that was made in this attempt, for each run."""
        try:
            lines = self._saves.read_text().splitlines()
        except OSError:
            return {}
        newest: dict[str, int] = {}
        for line in lines:
            try:
                found = json.loads(line)
                run, step = str(found["run"]), int(found["step"])
            except (ValueError, KeyError, TypeError):
                continue  # the disk was full
            newest[run] = max(step, newest.get(run, step))
        return newest

    def logs_to(self, url: str, folder: str, storage_options: Mapping[str, Any]) -> None:
        """Records where the log of the run is, which the supervisor adds its own to.

        Args:
            url: The directory of the run.
            folder: In that.
            storage_options: For it. What is not JSON is for this process only: the supervisor then
                tries without any.
        """
        options = dict(storage_options)
        try:
            json.dumps(options)
        except TypeError:
            options = {}
        # There may be a password among the options.
        failure = f"The supervisor could not be told of the log in {url}"
        _replace(self._logs, [url, folder, options], failure, mode=0o600)

    def logs(self) -> tuple[str, str, Mapping[str, Any]] | None:
        """What `logs_to` was given in this attempt."""
        try:
            url, folder, options = json.loads(self._logs.read_text())
        except (OSError, ValueError):
            return None
        return url, folder, options

    def report_settings(self, settings: Mapping[str, str]) -> None:
        """Records environment variables that the script has set before it imported this package,
        for the fork server, which imports TensorFlow with them. Without them, the server's workers
        would notice the difference and start over."""
        _replace(self._settings, dict(settings), f"The fork server will not know {settings}")

    def settings(self) -> dict[str, str]:
        """What `report_settings` was given in this attempt."""
        try:
            return {
                str(name): str(value)
                for name, value in json.loads(self._settings.read_text()).items()
            }
        except (OSError, ValueError, AttributeError):
            return {}

    def step_marker(self, run: str) -> Path:
        """Returns the file of the `StepMarker` of a run, which all attempts share.

        Args:
            run: Where the run is.
        """
        return self.status_dir.parent / f"{hashlib.sha256(run.encode()).hexdigest()[:16]}.step"

    def pulse_of(self, worker: str) -> Path:
        """The file that a worker touches while it can run Python; its process's number is in it."""
        return self.status_dir / f"{worker}.pulse"

    def start_pulse(self, worker: str) -> Path:
        """Creates the file of `pulse_of` for this process.

        Raises:
            OSError: The file cannot be written.
        """
        # If the process is stopped during this, an empty file would hide that from the
        # supervisor.
        _replace_text(self.pulse_of(worker), str(os.getpid()))
        return self.pulse_of(worker)

    def read(self, worker: str) -> Status | None:
        """The last report of `worker`, or None if there is none that can be read."""
        try:
            found = json.loads(self._path(worker).read_text())
            return Status(
                phase=Phase(found["phase"]),
                since={Phase(name): at for name, at in found["since"].items()},
                why=str(found["why"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def forget(self, worker: str) -> None:
        """Removes what a worker has told that is gone, for the one that takes its place."""
        for path in (self._path(worker), self.pulse_of(worker)):
            path.unlink(missing_ok=True)

    @property
    def _settings(self) -> Path:
        return self.status_dir / "settings.json"

    @property
    def _logs(self) -> Path:
        return self.status_dir / "logs"

    @property
    def _saves(self) -> Path:
        return self.status_dir / "saves"

    def _path(self, worker: str) -> Path:
        return self.status_dir / f"{worker}.json"


def _replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes `text` so that a reader sees it whole or not at all."""
    # Several threads of a process write here, each another file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(text)
    os.replace(temporary, path)


def _replace(path: Path, said: Any, failure: str, mode: int = 0o666) -> None:
    """Writes `said` so that a reader sees it whole or not at all; warns of `failure` otherwise."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace_text(path, json.dumps(said), mode)
    except OSError as error:
        warnings.warn(f"{failure}: {error}", stacklevel=3)
