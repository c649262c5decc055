"""A mock of Slurm's `scontrol`."""

from __future__ import annotations

import os
from pathlib import Path


class FakeSlurm:
    """Records the requests to `scontrol`.

    Args:
        folder: Folder of the program.
        then: Shell commands that it runs next.
        shown: Output of `scontrol show`.
    """

    def __init__(self, folder: Path, then: str = "", shown: str = "JobState=RUNNING") -> None:
        folder.mkdir()
        self._record = folder / "asked"
        program = folder / "scontrol"
        show = f"if [ $1 = show ]; then echo 'JobId=1234 {shown} Requeue=1'; exit; fi"
        program.write_text(f'#!/bin/sh\n{show}\necho "$*" >> "{self._record}"\n{then}\n')
        program.chmod(0o755)
        path = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        self.env = {"SLURM_JOB_ID": "1234", "PATH": path}

    def asked(self) -> list[str]:
        return self._record.read_text().splitlines() if self._record.exists() else []
