"""Finds the task number of an array job in the environment."""

from __future__ import annotations

from collections.abc import Mapping

from keras_distplug.cluster import roles

_TASKS = (
    "SLURM_ARRAY_TASK_ID",
    "PBS_ARRAY_INDEX",
    "PBS_ARRAYID",
    "SGE_TASK_ID",
    "LSB_JOBINDEX",
    "AWS_BATCH_JOB_ARRAY_INDEX",
)
# Kubernetes Jobs and Google Cloud Batch set these for array tasks and for workers of one job.
_TASKS_OR_WORKERS = ("JOB_COMPLETION_INDEX", "BATCH_TASK_INDEX")
_NO_TASK = {"SGE_TASK_ID": "undefined", "LSB_JOBINDEX": "0"}


def array_task(environ: Mapping[str, str]) -> str | None:
    """Returns the number of the task; None outside an array job.

    Args:
        environ: Usually `os.environ`.

    Raises:
        ClusterError: If the variables describe no valid cluster.
    """
    for name in (*_TASKS, *_TASKS_OR_WORKERS):
        task = environ.get(name)
        if not task or task == _NO_TASK.get(name):
            continue
        if name in _TASKS_OR_WORKERS and roles.from_environment(environ).world_size > 1:
            continue
        return task
    return None
