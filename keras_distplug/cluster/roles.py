"""Which part this process plays in the cluster, read from the environment alone.

Pure functions, standard library only: the supervisor and every worker ask this before TensorFlow
is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_distplug.core.errors import ClusterError

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

# Slurm numbers the steps that it starts itself (batch script, interactive shell, extern, pending)
# from the top of 32 bits; slurm.h: SLURM_INTERACTIVE_STEP 0xfffffffa ... SLURM_PENDING_STEP
# 0xfffffffd. No step of srun's reaches them.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Slurm jobs without reserved ports meet in 20000..31999: below Linux' ephemeral range (32768),
# where an outgoing connection may take a port at any time. Each step has a slot of 16 ports, so
# that neighbouring jobs on a shared node do not collide.
_FIRST_PORT, _SLOTS, _SLOT_SIZE = 20000, 750, 16

_PLAIN = re.compile(r"[\w.:\[\]-]{1,80}")


@dataclass(frozen=True)
class Role:
    """What this process is among the others.

    Args:
        task_type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        index: The place among the tasks of this type.
        cluster: For each task type its addresses, `"host:port"`. Empty for a single process.
        source: Where this was read: `"TF_CONFIG"`, `"Slurm"` or `"single process"`.
    """

    task_type: str
    index: int
    cluster: Mapping[str, tuple[str, ...]]
    source: str

    def __post_init__(self) -> None:
        _check_task(self.task_type, self.index, self.cluster)

    @property
    def is_chief(self) -> bool:
        """True for the chief task, or for worker 0 of a cluster that has no chief."""
        if "chief" in self.cluster:
            return self.task_type == "chief"
        return self.task_type == "worker" and self.index == 0

    @property
    def rank(self) -> int:
        """The place among the processes that train; 0 for the chief."""
        return self.index + ("chief" in self.cluster and self.task_type == "worker")

    @property
    def name(self) -> str:
        """For people and file names: `"worker-1"`."""
        return f"{self.task_type}-{self.index}"

    @property
    def world_size(self) -> int:
        """How many processes train, the chief included; 1 for a single process."""
        return len(self.cluster.get("chief", ())) + len(self.cluster.get("worker", ())) or 1

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all processes that train, in the order of their ranks."""
        if not self.cluster:
            return (self.name,)
        tasks = [(task, n) for task in ("chief", "worker") for n in self._tasks(task)]
        return tuple(f"{task}-{n}" for task, n in tasks)

    def _tasks(self, task_type: str) -> range:
        return range(len(self.cluster.get(task_type, ())))

    def to_tf_config(self) -> str:
        """The value of `TF_CONFIG` that says the same; `"{}"` for a single process."""
        if not self.cluster:
            return "{}"
        cluster = {task_type: list(addresses) for task_type, addresses in self.cluster.items()}
        return json.dumps(
            {"cluster": cluster, "task": {"type": self.task_type, "index": self.index}}
        )


def single_process() -> Role:
    """The role of a process that trains alone."""
    return Role(task_type="worker", index=0, cluster={}, source="single process")


def from_environment(environ: Mapping[str, str]) -> Role:
    """Reads the role of this process.

    `TF_CONFIG` wins when it is set; empty or `{}`, it says "single process". Otherwise the tasks of
    a Slurm step that `srun` started are the workers. Otherwise the process is alone.

    Args:
        environ: Usually `os.environ`.

    Raises:
        ClusterError: The variables describe no valid cluster.
    """
    tf_config = environ.get("TF_CONFIG")
    if tf_config is not None:
        return _from_tf_config(tf_config)
    if _in_srun_step(environ):
        return _from_slurm(environ)
    return single_process()


# --- TF_CONFIG ------------------------------------------------------------------------------------


def _from_tf_config(text: str) -> Role:
    if not text.strip():
        return single_process()
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(
            f"TF_CONFIG is not valid JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}. "
            'Expected an object such as {"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
            '"task": {"type": "worker", "index": 0}}. Unset it to train in a single process.'
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f"TF_CONFIG must be a JSON object with 'cluster' and 'task'. Received: a JSON "
            f"{_json_type(config)}."
        )
    if not config:
        return single_process()
    cluster = _read_cluster(_member(config, "cluster", "TF_CONFIG"))
    task = _member(config, "task", "TF_CONFIG")
    if not isinstance(task, dict):
        raise ClusterError(
            "TF_CONFIG['task'] must be an object with 'type' and 'index'. Received: a JSON "
            f"{_json_type(task)}."
        )
    task_type = _member(task, "type", "TF_CONFIG['task']")
    index = _member(task, "index", "TF_CONFIG['task']")
    if isinstance(index, str) and index.isdecimal():
        index = int(index)  # TensorFlow takes "1" for 1, and so do some schedulers.
    return Role(task_type=task_type, index=index, cluster=cluster, source="TF_CONFIG")


def _member(found: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in found:
        raise ClusterError(
            f"{where} has no {key!r}. Every process needs the whole cluster and its own task: set "
            f"{key!r}, or unset TF_CONFIG to train in a single process."
        )
    return found[key]


def _read_cluster(found: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(found, dict) or not found:
        received = f"a JSON {_json_type(found)}" if not isinstance(found, dict) else "{}"
        raise ClusterError(
            "TF_CONFIG['cluster'] must be an object of task types, each with its addresses. "
            f"Received: {received}. Unset TF_CONFIG to train in a single process."
        )
    for task_type, addresses in found.items():
        if task_type not in TASK_TYPES:
            raise ClusterError(
                f"TF_CONFIG['cluster'] has the unknown task type {_shown(task_type)}. "
                f"Expected: {', '.join(TASK_TYPES)}."
            )
        if not isinstance(addresses, list) or not addresses:
            received = "[]" if addresses == [] else f"a JSON {_json_type(addresses)}"
            raise ClusterError(
                f"TF_CONFIG['cluster'][{task_type!r}] must be a list of at least one 'host:port'. "
                f"Received: {received}. Leave {task_type!r} out if the cluster has none."
            )
    _check_addresses(found)
    if len(found.get("chief", ())) > 1:
        raise ClusterError(
            f"TF_CONFIG['cluster'] has {len(found['chief'])} chiefs. Expected one at most: list "
            "the others as workers."
        )
    if not {"chief", "worker"} & found.keys():
        raise ClusterError(
            "TF_CONFIG['cluster'] has neither a chief nor a worker, so nobody trains. Received "
            f"task types: {', '.join(found)}."
        )
    return {task_type: tuple(addresses) for task_type, addresses in found.items()}


def _check_addresses(cluster: Mapping[str, Sequence[Any]]) -> None:
    owners: dict[str, str] = {}
    for task_type, addresses in cluster.items():
        for index, address in enumerate(addresses):
            here = f"{task_type}[{index}]"
            if not _is_address(address):
                raise ClusterError(
                    f"TF_CONFIG['cluster']: {here} has no valid address. Expected 'host:port' with "
                    f"a port from 1 to 65535. Received: {_shown(address)}."
                )
            if address in owners:
                raise ClusterError(
                    f"TF_CONFIG['cluster']: {owners[address]} and {here} have the same address "
                    f"{_shown(address)}. Give every task its own port."
                )
            owners[address] = here


def _is_address(address: Any) -> bool:
    if not isinstance(address, str):
        return False
    host, _, port = address.rpartition(":")
    return bool(host.strip()) and port.isdecimal() and 0 < int(port) < 65536


def _check_task(task_type: Any, index: Any, cluster: Mapping[str, tuple[str, ...]]) -> None:
    if task_type not in TASK_TYPES:
        raise ClusterError(
            f"Unknown task type {_shown(task_type)}. Expected: {', '.join(TASK_TYPES)}."
        )
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ClusterError(f"The task's index must be an int >= 0. Received: {_shown(index)}.")
    # By TensorFlow's convention the evaluator stands outside the cluster that it watches.
    if not cluster or (task_type == "evaluator" and task_type not in cluster):
        return
    if task_type not in cluster:
        raise ClusterError(
            f"This task is a {task_type!r}, but the cluster has only: {', '.join(cluster)}. "
            "The task must be one of the cluster's."
        )
    if index >= len(cluster[task_type]):
        raise ClusterError(
            f"This task is {task_type} {index}, but the cluster lists {len(cluster[task_type])} "
            f"of that type. Expected an index from 0 to {len(cluster[task_type]) - 1}."
        )


def _shown(value: Any) -> str:
    # A mistyped variable may carry a token or a URL with a password into a log.
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return f"a string of {len(value)} characters that is not shown"
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"a JSON {_json_type(value)}"


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


# --- Slurm ----------------------------------------------------------------------------------------


def _in_srun_step(environ: Mapping[str, str]) -> bool:
    """Inside `sbatch` or `salloc` alone one process runs, however many tasks the job has."""
    step = environ.get("SLURM_STEP_ID", "")
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    return (
        step.isdecimal()
        and int(step) < _FIRST_SPECIAL_STEP
        and "SLURM_PROCID" in environ
        and tasks.isdecimal()
        and int(tasks) > 1
    )


def _from_slurm(environ: Mapping[str, str]) -> Role:
    nodes = expand_node_list(_variable(environ, "SLURM_STEP_NODELIST"))
    tasks = expand_task_counts(_variable(environ, "SLURM_STEP_TASKS_PER_NODE"))
    rank, total = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    if len(nodes) != len(tasks) or sum(tasks) != total:
        raise ClusterError(
            f"Slurm's variables disagree: SLURM_STEP_NUM_TASKS is {total}, SLURM_STEP_NODELIST "
            f"names {len(nodes)} nodes and SLURM_STEP_TASKS_PER_NODE {sum(tasks)} tasks on "
            f"{len(tasks)} nodes. Start the script with srun itself, or set TF_CONFIG."
        )
    places = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    if rank >= total:
        raise ClusterError(f"SLURM_PROCID is {rank}. Expected a number below {total}.")
    _check_block_layout(environ, rank, places[rank])
    ports = _slurm_ports(environ, max(tasks))
    addresses = tuple(f"{nodes[node]}:{ports[local]}" for node, local in places)
    return Role(task_type="worker", index=rank, cluster={"worker": addresses}, source="Slurm")


def _check_block_layout(environ: Mapping[str, str], rank: int, place: tuple[int, int]) -> None:
    # Only blocks let every task work out on which node the others run.
    variables = ("SLURM_NODEID", "SLURM_LOCALID")
    for variable, expected in zip(variables, place, strict=True):
        if variable in environ and _number(environ, variable) != expected:
            raise ClusterError(
                f"Slurm task {rank} has {variable}={environ[variable]}, but with tasks in blocks "
                f"it would be {expected}. Start the step with `srun --distribution=block`."
            )


def _slurm_ports(environ: Mapping[str, str], count: int) -> list[int]:
    """A port for each local rank: those that `srun --resv-ports` reserved, or else a range that
    follows from the job's and the step's number, so that all tasks arrive at the same one.
    """
    reserved = environ.get("SLURM_STEP_RESV_PORTS")
    if reserved:
        ports = [int(port) for port in _expand_ranges(reserved, "SLURM_STEP_RESV_PORTS")]
        if len(ports) < count:
            raise ClusterError(
                f"SLURM_STEP_RESV_PORTS reserves {len(ports)} ports, but {count} tasks share a "
                f"node. Start the step with `srun --resv-ports={count}`."
            )
        return ports[:count]
    job = _number(environ, "SLURM_JOB_ID")
    slot = (job + 97 * _number(environ, "SLURM_STEP_ID")) % _SLOTS
    first = _FIRST_PORT + slot * _SLOT_SIZE
    return list(range(first, first + count))


def expand_node_list(text: str) -> list[str]:
    """`"node[01-03,07],gpu5"` -> `["node01", "node02", "node03", "node07", "gpu5"]`."""
    return [name for part in _split_outside_brackets(text) for name in _expand_name(part)]


def expand_task_counts(text: str) -> list[int]:
    """`"2(x3),1"` -> `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise ClusterError(
                "SLURM_STEP_TASKS_PER_NODE must look like '2(x3),1'. "
                f"Received: {_shown(text.replace('(', '').replace(')', ''))}."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _expand_name(text: str) -> Iterator[str]:
    before, bracket, rest = text.partition("[")
    if not bracket:
        if not text or "]" in text:
            raise _bad_node_list(text)
        yield text
        return
    inside, closed, after = rest.partition("]")
    if not closed:
        raise _bad_node_list(text)
    tails = list(_expand_name(after)) if after else [""]
    for number in _expand_ranges(inside, "SLURM_STEP_NODELIST"):
        for tail in tails:
            yield f"{before}{number}{tail}"


def _expand_ranges(text: str, variable: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise ClusterError(
                f"{variable} has a range that cannot be read. Expected such as '01-03,07'. "
                f"Received: {_shown(part)}."
            )
        width = len(found[1])
        last = int(found[2] or found[1])
        numbers += [f"{number:0{width}d}" for number in range(int(found[1]), last + 1)]
    return numbers


def _bad_node_list(text: str) -> ClusterError:
    return ClusterError(
        "SLURM_STEP_NODELIST must look like 'node[01-03,07],gpu5'. The part that cannot be read: "
        f"{_shown(text)}."
    )


def _variable(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ClusterError(
            f"This is a Slurm step of several tasks, but {name} is not set. Start the script with "
            "srun itself, or set TF_CONFIG."
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _variable(environ, name)
    if not text.isdecimal():
        raise ClusterError(f"{name} must be a number. Received: {_shown(text)}.")
    return int(text)
