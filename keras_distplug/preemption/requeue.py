"""Requeues a Slurm job."""

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
_SAME_SECS = 5.0  # a job preempted by Slurm ends this soon after its `PreemptTime`
_ENDED = ("COMPLETING", "CANCELLED")
_SHOW_TIMEOUT_S = 5.0  # both requests must fit into Slurm's KillWait of 30 s
_TIMEOUT_S = 20.0  # the controller of a busy cluster is slow


@dataclass(frozen=True)
class Requeue:
    """Asks Slurm to requeue this job, which ends its current run.

    Args:
        job: Job ID: `"1234"`, or `"1234_5"` for a task of an array.
        program: Path of `scontrol`.
        restarts: Number of times that Slurm has restarted the job. Defaults to 0.
    """

    job: str
    program: str
    restarts: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Reads the job from an environment, usually `os.environ`.

        Raises:
            ConfigurationError: Outside a Slurm job, or if `scontrol` is not on PATH.
        """
        job = environ.get("SLURM_JOB_ID")
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        if array and task:
            job = f"{array}_{task}"  # a task's SLURM_JOB_ID may be that of the whole array
        if not job:
            raise ConfigurationError(
                "`requeue=True` requires a Slurm job. Received: no SLURM_JOB_ID in the "
                "environment. Start the script with `sbatch`, or omit `requeue`."
            )
        program = shutil.which("scontrol", path=environ.get("PATH"))
        if program is None:
            raise ConfigurationError(
                "`requeue=True` requires Slurm's `scontrol`. Received: a PATH without it. Add its "
                "folder to PATH, or omit `requeue`."
            )
        restarts = environ.get("SLURM_RESTART_COUNT", "")
        return cls(job, program, int(restarts) if restarts.isdecimal() else 0)

    def ask(self) -> str:
        """Requeues the job, unless it is already queued or was canceled.

        Returns:
            A readable message about the outcome.
        """
        done = self._run("show", "job", "-o", self.job, timeout_s=_SHOW_TIMEOUT_S)
        if not isinstance(done, str) and done.returncode == 0:
            # Later fields contain text from the user, and further lines may describe other jobs.
            fields = _FIELD.findall(done.stdout.partition("\n")[0])
            state = dict(reversed(fields))
            if int(state.get("Restarts", 0)) > self.restarts:
                return f"job {self.job} is in Slurm's queue again"
            # COMPLETING may mean canceled by the user, or ended by Slurm itself.
            is_slurms = state.get("Reason") == "TimeLimit" or _is_preempted(state)
            if state.get("JobState") in _ENDED and not is_slurms:
                return (
                    f"job {self.job} was canceled, so it is not requeued; its next start resumes "
                    "from the checkpoint"
                )
        done = self._run("requeue", self.job)
        if isinstance(done, str):
            failure = done
        elif done.returncode == 0:
            return f"job {self.job} is in Slurm's queue again"
        else:
            output = done.stdout.strip() or "no output"
            failure = f"exit code {done.returncode}: {output}"
        return f"`scontrol requeue {self.job}` failed, so restart the job yourself: {failure}"

    def _run(
        self, *arguments: str, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str] | str:
        """Runs `scontrol`. Returns its result, or the reason if it gave none."""
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
            return f"no answer within {_TIMEOUT_S:g} s"
        except OSError as error:
            return f"it cannot be started: {error}"


def _is_preempted(state: Mapping[str, str]) -> bool:
    """Returns True if a preemption ended the job.

    An earlier preemption, such as a suspension, does not count.
    """
    try:
        ended = datetime.fromisoformat(state["EndTime"])
        preempted = datetime.fromisoformat(state["PreemptTime"])
    except (KeyError, ValueError):
        return False
    return abs((ended - preempted).total_seconds()) <= _SAME_SECS
