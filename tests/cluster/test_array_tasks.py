"""Detection of array jobs' tasks from their schedulers' variables."""

from __future__ import annotations

import json

import pytest

from keras_distplug.cluster.array_tasks import array_task

CLUSTER = json.dumps(
    {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
)


@pytest.mark.parametrize(
    ("environ", "task"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "2"),
        ({"SLURM_ARRAY_TASK_ID": "2", "TF_CONFIG": CLUSTER}, "2"),
        ({"PBS_ARRAY_INDEX": "3"}, "3"),
        ({"PBS_ARRAYID": "3"}, "3"),
        ({"SGE_TASK_ID": "undefined"}, None),
        ({"SGE_TASK_ID": "4"}, "4"),
        ({"LSB_JOBINDEX": "0"}, None),
        ({"LSB_JOBINDEX": "1"}, "1"),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "0"}, "0"),
        ({"JOB_COMPLETION_INDEX": "5"}, "5"),
        ({"JOB_COMPLETION_INDEX": "1", "TF_CONFIG": CLUSTER}, None),  # a worker's number
        ({"BATCH_TASK_INDEX": "1", "TF_CONFIG": CLUSTER}, None),
    ],
)
def test_array_task(environ: dict[str, str], task: str | None) -> None:
    assert array_task(environ) == task
