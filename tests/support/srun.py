"""Stands in for Slurm's `srun`, with all tasks on this machine: srun.py [--OPTION=...] COMMAND...

Starts SLURM_NTASKS tasks with the variables of a step, as Slurm's documents name them, and writes
their process ids to the file FAKE_SRUN_TASKS. Like srun (seen with Slurm 22.05) it ends with 128 +
n if a task has died by signal n, and else with the highest code of a task.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.cluster import free_ports


def main(arguments: list[str]) -> int:
    while arguments[0].startswith("-"):
        arguments = arguments[1:]
    count = int(os.environ["SLURM_NTASKS"])
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(count),
        "SLURM_STEP_RESV_PORTS": ",".join(map(str, free_ports(count))),
        "SLURM_NODEID": "0",
    }
    tasks = [
        subprocess.Popen(
            arguments,
            env=os.environ | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(count)
    ]
    told = Path(os.environ["FAKE_SRUN_TASKS"])
    told.with_suffix(".new").write_text(json.dumps([task.pid for task in tasks]))
    told.with_suffix(".new").rename(told)
    codes = [task.wait() for task in tasks]
    print(f"srun: the tasks' codes are {codes}", flush=True)
    return 128 - min(codes) if min(codes) < 0 else max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
