"""Slurm: putting this job into the queue again."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from keras_distplug.core.errors import ConfigurationError

_TIMEOUT_S = 20.0  # the controller of a busy cluster takes its time


@dataclass(frozen=True)
class Requeue:
    """How to ask Slurm for another run of this job, which ends the one that asks.

    Args:
        job: As Slurm calls it: `"1234"`, or `"1234_5"` for a task of an array.
        program: The path of `scontrol`.
    """

    job: str
    program: str

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
        return cls(job, program)

    def ask(self) -> str | None:
        """None, or what Slurm has against it."""
        command = [self.program, "requeue", self.job]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"it has not answered within {_TIMEOUT_S:g} s"
        except OSError as error:
            return f"it cannot be started: {error}"
        if done.returncode == 0:
            return None
        return f"exit code {done.returncode}: {done.stdout.strip() or 'it says nothing'}"
