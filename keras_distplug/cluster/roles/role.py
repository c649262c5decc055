"""The role of a process in its cluster, as a value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_distplug.core.errors import ClusterError

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

_PLAIN = re.compile(r"[\w.:\[\]-]{1,80}")


@dataclass(frozen=True)
class Role:
    """The role of this process in its cluster.

    Args:
        task_type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        index: The index among the tasks of this type.
        cluster: The addresses, `"host:port"`, by task type. Empty for a single process.
        source: Where the role was read: `"TF_CONFIG"`, `"Slurm"`, `"Vertex AI"`, `"SageMaker"`,
            `"Kubernetes"` or `"single process"`.
    """

    task_type: str
    index: int
    cluster: Mapping[str, tuple[str, ...]]
    source: str

    def __post_init__(self) -> None:
        _check_task(self.task_type, self.index, self.cluster, self.source)

    @property
    def is_chief(self) -> bool:
        """True for the chief task, or for worker 0 of a cluster that has no chief."""
        if "chief" in self.cluster:
            return self.task_type == "chief"
        return self.task_type == "worker" and self.index == 0

    @property
    def is_server(self) -> bool:
        """True if this process only runs what the chief of a cluster with 'ps' tasks schedules."""
        return "ps" in self.cluster and self.task_type in ("worker", "ps")

    @property
    def rank(self) -> int:
        """The rank among the processes that train together; 0 for the chief."""
        return self.index + ("chief" in self.cluster and self.task_type == "worker")

    @property
    def name(self) -> str:
        """The name for people and file names, such as `"worker-1"`."""
        return f"{self.task_type}-{self.index}"

    @property
    def world_size(self) -> int:
        """The number of processes that train together, including the chief.

        1 for a single process, and in a cluster with 'ps' tasks: only its chief has callbacks, and
        the other tasks serve it.
        """
        if "ps" in self.cluster:
            return 1
        return len(self.cluster.get("chief", ())) + len(self.cluster.get("worker", ())) or 1

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all processes that train together, by rank."""
        if not self.cluster:
            return (self.name,)
        if "ps" in self.cluster:
            return ("chief-0",)
        counts = [(task, len(self.cluster.get(task, ()))) for task in ("chief", "worker")]
        return tuple(f"{task}-{index}" for task, count in counts for index in range(count))

    def to_tf_config(self) -> str:
        """Returns the value of `TF_CONFIG` for the tasks that train and serve; `"{}"` for a single
        process."""
        if not self.cluster:
            return "{}"
        # TensorFlow would also wait for the evaluator, which never joins.
        cluster = {
            task_type: list(addresses)
            for task_type, addresses in self.cluster.items()
            if task_type != "evaluator"
        }
        return json.dumps(
            {"cluster": cluster, "task": {"type": self.task_type, "index": self.index}}
        )


def single_process() -> Role:
    """Returns the role of a process that trains alone."""
    return Role(task_type="worker", index=0, cluster={}, source="single process")


def _check_task(
    task_type: Any, index: Any, cluster: Mapping[str, tuple[str, ...]], source: str
) -> None:
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ClusterError(
            f"The task's index, from {source}, must be an int >= 0. Received: {shown(index)}."
        )
    # By TensorFlow's convention, the evaluator is outside the cluster that it watches.
    if not cluster or (task_type == "evaluator" and task_type not in cluster):
        return
    if task_type not in cluster:
        raise ClusterError(
            f"This task, from {source}, is a {task_type!r}, but the cluster has only: "
            f"{', '.join(cluster)}. Add the task to the cluster, or correct its type."
        )
    if index >= len(cluster[task_type]):
        raise ClusterError(
            f"This task, from {source}, is {task_type} {index}, but the cluster lists "
            f"{len(cluster[task_type])} of that type, numbered from 0. Correct the index, or add "
            "the task to the cluster."
        )


# For the errors of all sources.


def shown(value: Any) -> str:
    """Returns a value for an error. A mistyped variable may contain a token or a password."""
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return f"a string of {len(value)} characters that is not shown"
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"a JSON {json_type(value)}"


def json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
