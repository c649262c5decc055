"""Which part this process plays in the cluster, read from the environment alone.

Pure functions, standard library only: the supervisor and every worker ask this before TensorFlow
is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from keras_distplug.cluster.roles import kubernetes, launchers, sagemaker, slurm, vertex
from keras_distplug.cluster.roles.role import Role, single_process
from keras_distplug.cluster.roles.tf_config import from_tf_config
from keras_distplug.core.supervised import JOB

__all__ = ["VARIABLES", "Role", "from_environment", "require_not_numbered", "single_process"]

# What to unset for a process that is to be alone, by `Role.source`.
VARIABLES = {
    "TF_CONFIG": "TF_CONFIG",
    "Slurm": "SLURM_STEP_ID",
    "Vertex AI": "CLUSTER_SPEC",
    "SageMaker": "SM_HOSTS",
    "Kubernetes": kubernetes.ADDRESS,
}


def from_environment(environ: Mapping[str, str]) -> Role:
    """Reads the role of this process.

    `TF_CONFIG` wins when it is set; empty or `{}`, it says "single process". Otherwise the tasks of
    a Slurm step that `srun` started are the workers, or the replicas of Vertex AI's `CLUSTER_SPEC`,
    or the hosts of SageMaker's `SM_HOSTS`, or the pods of an indexed Job of Kubernetes whose
    manifest has KERAS_DISTPLUG_ADDRESS. Otherwise the process is alone.

    Args:
        environ: Usually `os.environ`.

    Raises:
        ClusterError: The variables describe no valid cluster.
    """
    if (tf_config := environ.get("TF_CONFIG")) is not None:
        return from_tf_config(tf_config)
    if slurm.is_step(environ):
        return slurm.from_step(environ)
    if vertex.is_replica(environ):
        return vertex.from_cluster_spec(environ["CLUSTER_SPEC"])
    if sagemaker.is_container(environ):
        return sagemaker.from_hosts(environ)
    if kubernetes.is_pod(environ):
        return kubernetes.from_pod(environ)
    return single_process()


def require_not_numbered(environ: Mapping[str, str]) -> None:
    """Checks that a process which seems to be alone is not one of several that `torchrun` or
    `mpirun` has started.

    Args:
        environ: Usually `os.environ`.

    Raises:
        ClusterError: If it is.
    """
    is_told = environ.get("TF_CONFIG") is not None or JOB in environ  # by a supervisor
    if not is_told and not from_environment(environ).cluster:
        launchers.require_none(environ)
