"""Chooses a strategy from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from keras_distplug.core.errors import ConfigurationError

NAMES = ("auto", "one_device", "mirrored", "multi_worker", "central_storage", "parameter_server")


class Cluster(Protocol):
    """The part of `cluster.roles.Role` that a choice depends on."""

    @property
    def cluster(self) -> Mapping[str, tuple[str, ...]]: ...

    @property
    def task_type(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class Choice:
    """The name of a strategy, and the reason for choosing it."""

    name: str
    reason: str


def choose(requested: str, cluster: Cluster, gpus: int) -> Choice:
    """Chooses a strategy.

    Args:
        requested: One of `NAMES`.
        cluster: The cluster that this process belongs to.
        gpus: The number of GPUs visible to this process.

    Raises:
        ConfigurationError: If the name is unknown, or does not fit the cluster.
    """
    if requested not in NAMES:
        raise ConfigurationError(
            f"Unknown strategy. Received: strategy={requested!r}. Expected one of "
            f"{', '.join(map(repr, NAMES))}, or a tf.distribute.Strategy."
        )
    if cluster.task_type == "evaluator":
        raise ConfigurationError(
            f"Expected a task that trains. Received: an 'evaluator' task ({cluster.source}), which "
            "would train the whole model on its own. Training validates between epochs: pass "
            "`validation_data` to `fit` and remove the evaluator from the job, or give it a script "
            "that reads checkpoints (`keras-distplug export`)."
        )
    choice = _automatic(cluster, gpus) if requested == "auto" else Choice(requested, "requested")
    if choice.name == "parameter_server" or "ps" in cluster.cluster:
        _check_parameter_server(choice, cluster)
        return choice
    if choice.name == "multi_worker" and cluster.world_size < 2:
        raise ConfigurationError(
            "strategy='multi_worker' needs a cluster of at least two workers, but this process is "
            "not part of one. Start the script with "
            "`keras-distplug run --workers 2 -- python train.py` or with srun, or set TF_CONFIG."
        )
    if choice.name != "multi_worker" and cluster.world_size > 1:
        raise ConfigurationError(
            f"strategy={choice.name!r} was requested, but {cluster.source} describes a cluster of "
            f"{cluster.world_size} workers. Each would train a separate model, and all would save "
            "to the same directory. Use strategy='multi_worker' or 'auto', or start only one "
            "process."
        )
    return choice


def _check_parameter_server(choice: Choice, cluster: Cluster) -> None:
    has = ", ".join(f"{len(tasks)} {task!r}" for task, tasks in cluster.cluster.items())
    if choice.name != "parameter_server":
        raise ConfigurationError(
            f"strategy={choice.name!r} was requested, but {cluster.source} describes a cluster "
            f"with parameter servers ({has}). Use strategy='parameter_server' or 'auto', or remove "
            "the 'ps' tasks."
        )
    missing = [task for task in ("chief", "worker", "ps") if task not in cluster.cluster]
    if missing:
        received = f"{has} ({cluster.source})" if has else "a single process"
        raise ConfigurationError(
            "strategy='parameter_server' needs a cluster with one 'chief', which runs `fit`, "
            "'worker' tasks, which compute, and 'ps' tasks, which hold the variables. Received: "
            f"{received}. Missing: {', '.join(missing)}. Start "
            "the script with `keras-distplug run --workers 2 --ps 1 -- python train.py`, or set a "
            "TF_CONFIG with all three task types for every process."
        )
    if "evaluator" in cluster.cluster:
        raise ConfigurationError(
            "Expected no 'evaluator' task: with parameter servers, the chief evaluates between "
            f"epochs. Received: {has} ({cluster.source}). Remove the evaluator."
        )


def _automatic(cluster: Cluster, gpus: int) -> Choice:
    if "ps" in cluster.cluster:
        return Choice("parameter_server", f"{cluster.source} has 'ps' tasks")
    if cluster.world_size > 1:
        return Choice("multi_worker", f"{cluster.source} has {cluster.world_size} workers")
    if gpus > 1:
        return Choice("mirrored", f"{gpus} GPUs on this machine")
    return Choice("one_device", f"{gpus or 'no'} GPU on this machine")
