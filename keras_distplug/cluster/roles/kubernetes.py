"""The role of a pod of an indexed Job, such as those of a JobSet or a TrainJob.

Kubernetes numbers the pods, and a JobSet gives every pod a host name with that number. The manifest
of the Job sets their number, and the pattern of their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping

from keras_distplug.cluster.roles.role import Role, shown, single_process
from keras_distplug.cluster.roles.tf_config import is_address
from keras_distplug.core.errors import ClusterError

ADDRESS = "KERAS_DISTPLUG_ADDRESS"  # with {index}
_WORKERS = "KERAS_DISTPLUG_WORKERS"
_WORKERS_OF_TRAINER = "JAX_NUM_PROCESSES"  # Kubeflow Trainer sets it for `mlPolicy.jax`
_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in indexed Jobs
_PLACE = "{index}"
_MOST = 65_536


def is_pod(environ: Mapping[str, str]) -> bool:
    """True if the manifest sets the pattern of the workers' addresses."""
    return ADDRESS in environ


def from_pod(environ: Mapping[str, str]) -> Role:
    """Returns the role of a pod. All pods of the Job are workers, by their numbers."""
    names = (_WORKERS, _WORKERS_OF_TRAINER)
    name = next((each for each in names if each in environ), _WORKERS)
    workers = _number(
        environ, name, 1, "Set it, in the environment of every pod, to the number of pods"
    )
    index = _number(environ, _INDEX, 0, "Kubernetes sets it in Jobs with completionMode: Indexed")
    if workers == 1:
        return single_process()
    if index >= workers:
        raise ClusterError(
            f"{_INDEX} is {index}, but {name} says that there are {workers} workers, numbered from "
            f"0. Expected {name} to be the number of pods: the Job's `completions`, which must "
            "equal its `parallelism`."
        )
    pattern = environ[ADDRESS]
    addresses = tuple(pattern.replace(_PLACE, str(number)) for number in range(workers))
    if _PLACE not in pattern or not all(map(is_address, addresses)):
        received = shown(pattern)
        if _PLACE in pattern:
            received = f"{shown(addresses[0])}, with 0 in the place of {_PLACE}"
        raise ClusterError(
            f"{ADDRESS} must be 'host:port' with {_PLACE} in it, such as "
            f"'digits-worker-0-{_PLACE}.digits:2222'. Received: {received}."
        )
    return Role("worker", index, {"worker": addresses}, "Kubernetes")


def _number(environ: Mapping[str, str], name: str, least: int, remedy: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or not least <= int(text[:9]) <= _MOST or len(text) > 9:
        raise ClusterError(
            f"{ADDRESS} is set, so {name} must be a number from {least} to {_MOST}. Received: "
            f"{shown(text) if text else 'nothing'}. {remedy}. If this process should not join a "
            f"cluster, unset {ADDRESS}."
        )
    return int(text)
