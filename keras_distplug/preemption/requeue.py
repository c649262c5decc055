"""Slurm: putting this job into the queue again."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from keras_distplug.core.errors import ConfigurationError

_FIELD = re.compile(r"(?:^|\s)(JobState|Reason|Restarts|PreemptTime|EndTime)=(\S+)")
_SAME_SECS = 5.0  # a job that Slurm preempts ends then
_ENDED = ("COMPLETING", "CANCELLED")
_SHOW_TIMEOUT_S = 5.0  # Slurm's KillWait of 30 s is for both
_TIMEOUT_S = 20.0  # the controller of a busy cluster takes its time


@dataclass(frozen=True)
class Requeue:
    """How to ask Slurm for another run of this job, which ends the one that asks.

    Args:
        job: As Slurm calls it: `"1234"`, or `"1234_5"` for a task of an array.
        program: The path of `scontrol`.
        restarts: How often Slurm has started the job again.
    """

    job: str
    program: str
    restarts: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """What the environment says, usually `os.environ`.

        Raises:
            ConfigurationError: If this is no job of Slurm's, or there is no `scontrol`.
        """
        job = environ.get("SLURM_JOB_ID")
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        if array and task:
            job = f"{array}_{task}"  # the other name of one task may be that of the whole array
        if not job:
            raise ConfigurationError(
                "`requeue=True` needs a job of Slurm's. Received: no SLURM_JOB_ID in the "
                "environment. Start the script by `sbatch`, or leave `requeue` out."
            )
        program = shutil.which("scontrol", path=environ.get("PATH"))
        if program is None:
            raise ConfigurationError(
                "`requeue=True` needs Slurm's `scontrol`. Received: a PATH without it. Add the "
                "folder that it is in, or leave `requeue` out."
            )
        restarts = environ.get("SLURM_RESTART_COUNT", "")
        return cls(job, program, int(restarts) if restarts.isdecimal() else 0)

    def ask(self) -> str:
        """Puts the job into the queue, unless it is there already or was canceled; what came of
        it, for people."""
        done = self._run("show", "job", "-o", self.job, timeout_s=_SHOW_TIMEOUT_S)
        if not isinstance(done, str) and done.returncode == 0:
            # Later fields contain the user's text, and further lines may describe other jobs.
            fields = _FIELD.findall(done.stdout.partition("\n")[0])
            state = dict(reversed(fields))
            if int(state.get("Restarts", 0)) > self.restarts:
                return f"job {self.job} is in Slurm's queue again"
            # Slurm shows a canceled job as COMPLETING, and so the ones that ended by its own doing.
            is_slurms = state.get("Reason") == "TimeLimit" or _is_preempted(state)
            if state.get("JobState") in _ENDED and not is_slurms:
                return (
                    f"job {self.job} was canceled, so it is not put into the queue; its next start "
                    "resumes from the checkpoint"
                )
        done = self._run("requeue", self.job)
        if isinstance(done, str):
            failure = done
        elif done.returncode == 0:
            return f"job {self.job} is in Slurm's queue again"
        else:
            said = done.stdout.strip() or "it says nothing"
            failure = f"exit code {done.returncode}: {said}"
        return f"`scontrol requeue {self.job}` failed, so start the job again yourself: {failure}"

    def _run(
        self, *arguments: str, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str] | str:
        """What `scontrol` answers, or why it does not."""
        try:
            return subprocess.run(
                [self.program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout_s or _TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"it has not answered within {_TIMEOUT_S:g} s"
        except OSError as error:
            return f"it cannot be started: {error}"


def _is_preempted(state: Mapping[str, str]) -> bool:
    """Whether the job has ended because of a preemption. One may have come before, such as for a
    job that was suspended."""
    try:
        ended = datetime.fromisoformat(state["EndTime"])
        preempted = datetime.fromisoformat(state["PreemptTime"])
    except (KeyError, ValueError):
        return False
    return abs((ended - preempted).total_seconds()) <= _SAME_SECS
