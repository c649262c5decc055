"""Reads the role of this process in the cluster from the environment.

Pure functions, standard library only: the supervisor and every worker call them before TensorFlow
is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from keras_distplug.cluster.roles import kubernetes, launchers, sagemaker, slurm, vertex
from keras_distplug.cluster.roles.role import Role, single_process
from keras_distplug.cluster.roles.tf_config import from_tf_config
from keras_distplug.core.supervised import JOB

__all__ = ["VARIABLES", "Role", "from_environment", "require_not_numbered", "single_process"]

# Variables to unset for a single process, by `Role.source`.
VARIABLES = {
    "TF_CONFIG": "TF_CONFIG",
    "Slurm": "SLURM_STEP_ID",
    "Vertex AI": "CLUSTER_SPEC",
    "SageMaker": "SM_HOSTS",
    "Kubernetes": kubernetes.ADDRESS,
}


def from_environment(environ: Mapping[str, str]) -> Role:
    """Reads the role of this process.

    `TF_CONFIG` has precedence; empty or `{}` means a single process. Otherwise, the workers are the
    tasks of a Slurm step that `srun` started, the replicas in Vertex AI's `CLUSTER_SPEC`, the hosts
    in SageMaker's `SM_HOSTS`, or the pods of an indexed Kubernetes Job whose manifest sets
    KERAS_DISTPLUG_ADDRESS. Otherwise, this is a single process.

    Args:
        environ: Usually `os.environ`.

    Raises:
        ClusterError: If the variables describe no valid cluster.
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
    """Checks that what looks like a single process is not one of several that `torchrun` or
    `mpirun` started.

    Args:
        environ: Usually `os.environ`.

    Raises:
        ClusterError: If it is.
    """
    is_explicit = environ.get("TF_CONFIG") is not None or JOB in environ  # a supervisor's
    if not is_explicit and not from_environment(environ).cluster:
        launchers.require_none(environ)
