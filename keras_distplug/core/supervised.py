"""The interface between a supervisor and its workers.

The supervisor passes environment variables to the workers; every worker reports in a small file.

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
JOINED_BY = "KERAS_DISTPLUG_JOINED_BY"  # the process that joins; its subprocesses do not join
FORK_SERVER = "KERAS_DISTPLUG_FORK_SERVER"  # in the fork server: variables set by scripts, as JSON


class Phase(enum.StrEnum):
    """The progress of a worker. A worker reports every phase when it reaches it."""

    JOINED = "joined"  # the cluster is formed
    FITTING = "fitting"  # `fit` has started; no batch is complete yet
    TRAINING = "training"  # the first batch of this attempt is complete
    PREEMPTED = "preempted"  # preempted after saving a checkpoint in this attempt
    HUNG = "hung"  # training made no progress
    REFUSED = "refused"  # the script's input cannot be trained; restarts would not help
    COMPLETED = "completed"  # the last `fit` finished and recorded it


@dataclass(frozen=True)
class Status:
    """One worker's report.

    Args:
        phase: The latest phase.
        since: Time at which every phase was reached, in seconds since 1970.
        why: Explanation of the latest phase. Defaults to none.
    """

    phase: Phase
    since: Mapping[Phase, float]
    why: str = ""


@dataclass(frozen=True)
class Supervised:
    """The contract between a supervisor and a worker.

    Args:
        job: ID shared by all attempts of one `keras-distplug run`.
        attempt: 0 for the first start, incremented by every restart.
        status_dir: Folder for the reports of the workers, a new one for every attempt.
        devices_per_worker: Number of devices that every worker uses. Defaults to None, which
            leaves the choice to TensorFlow.
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
        """Returns the contract of this process, or None if it has no supervisor."""
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

        If the report cannot be written, it warns only, because training has not failed. Without
        the final report, the supervisor restarts the job, which then finds its run complete.
        """
        before = self.read(worker)
        since = {**(before.since if before else {}), phase: time.time()}
        _replace(
            self._path(worker),
            {"phase": phase, "since": since, "why": why},
            f"{worker} could not report phase `{phase}` to its supervisor",
        )

    def saved(self, run: str, step: int) -> None:
        """Records a new checkpoint. Called by the chief, from any thread.

        Args:
            run: Location of the run.
            step: Number of steps since the start of the run.
        """
        try:
            self.status_dir.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"run": run, "step": step}) + "\n"
            # In a single write: a local and a regular checkpoint may be completed simultaneously.
            file = os.open(self._saves, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)
        except OSError as error:
            warnings.warn(
                f"The checkpoint of step {step} was saved, but could not be reported to "
                f"`keras-distplug run`: {error}. The supervisor may therefore count this "
                f"attempt as one without progress. Check that {self.status_dir} is writable.",
                stacklevel=2,
            )

    def newest_saves(self) -> dict[str, int]:
        """Returns the step of the newest checkpoint of this attempt, for every run."""
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
                continue  # truncated, because the disk was full
            newest[run] = max(step, newest.get(run, step))
        return newest

    def report_log_folder(self, url: str, folder: str, storage_options: Mapping[str, Any]) -> None:
        """Records the location of the run's log, to which the supervisor adds its own file.

        Args:
            url: Directory of the run.
            folder: Folder of the log in `url`.
            storage_options: Options for the store. If they are not JSON-serializable, they cannot
                be passed on, and the supervisor tries without options.
        """
        options = dict(storage_options)
        try:
            json.dumps(options)
        except TypeError:
            options = {}
        # The options may contain a password.
        failure = f"The log in {url} could not be reported to the supervisor"
        _replace(self._logs, [url, folder, options], failure, mode=0o600)

    def logs(self) -> tuple[str, str, Mapping[str, Any]] | None:
        """Returns the arguments of `report_log_folder` in this attempt, or None."""
        try:
            url, folder, options = json.loads(self._logs.read_text())
        except (OSError, ValueError):
            return None
        return url, folder, options

    def report_settings(self, settings: Mapping[str, str]) -> None:
        """Records environment variables that the script set before it imported this package.

        The fork server imports TensorFlow with them. Otherwise the workers it forks would notice
        the difference and start over.
        """
        _replace(
            self._settings,
            dict(settings),
            f"{settings} could not be reported to the fork server",
        )

    def settings(self) -> dict[str, str]:
        """Returns the settings reported in this attempt."""
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

    def pulse_file(self, worker: str) -> Path:
        """Returns a file that holds a worker's PID; the worker touches it while Python can run."""
        return self.status_dir / f"{worker}.pulse"

    def start_pulse(self, worker: str) -> Path:
        """Creates the file `pulse_file(worker)` for this process.

        Raises:
            OSError: If the file cannot be written.
        """
        # The file appears with its content: an empty one would hide from the supervisor that the
        # process was stopped meanwhile.
        _replace_text(self.pulse_file(worker), str(os.getpid()))
        return self.pulse_file(worker)

    def read(self, worker: str) -> Status | None:
        """Returns the last report of `worker`, or None if it is missing or unreadable."""
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
        """Removes the reports of a worker that has exited, before another takes its place."""
        for path in (self._path(worker), self.pulse_file(worker)):
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
    """Writes `text` atomically: a reader sees all of it or nothing."""
    # Several threads of a process may write, but always different files.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(text)
    os.replace(temporary, path)


def _replace(path: Path, content: Any, failure: str, mode: int = 0o666) -> None:
    """Writes `content` as JSON, atomically; warns with `failure` if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace_text(path, json.dumps(content), mode)
    except OSError as error:
        warnings.warn(f"{failure}: {error}", stacklevel=3)
