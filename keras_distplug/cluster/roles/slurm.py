"""The role of a task that Slurm's `srun` started."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from keras_distplug.cluster.roles.role import Role, shown
from keras_distplug.core.errors import ClusterError

# Slurm numbers the steps that it starts itself (batch script, interactive shell, extern, pending)
# from the top of 32 bits; slurm.h: SLURM_INTERACTIVE_STEP 0xfffffffa ... SLURM_PENDING_STEP
# 0xfffffffd. No step of srun's reaches them.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Slurm jobs without reserved ports use 20000..31999, below Linux' ephemeral range (32768), where an
# outgoing connection may take a port at any time. Every step has a slot of 16 ports, so that
# neighboring jobs on a shared node do not collide.
_FIRST_PORT, _SLOTS, _SLOT_SIZE = 20000, 750, 16

_MOST = 65_536  # nodes or tasks: a mistyped range must not fill the memory
_TASK_COUNTS = re.compile(r"[\w(),.-]{1,80}")  # other text is not shown: it may be a secret
_REMEDY = "Start the script directly with srun, or set TF_CONFIG."
T = TypeVar("T")


def is_step(environ: Mapping[str, str]) -> bool:
    """True for one of several tasks of a step. In `sbatch` or `salloc` without `srun`, one process
    runs, however many tasks the job has."""
    step = environ.get("SLURM_STEP_ID", "")
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    return (
        step.isdecimal()
        and int(step) < _FIRST_SPECIAL_STEP
        and "SLURM_PROCID" in environ
        and tasks.isdecimal()
        and int(tasks) > 1
    )


def from_step(environ: Mapping[str, str]) -> Role:
    """Returns the role of a task. All tasks of the step are workers, in blocks over its nodes."""
    nodes = expand_node_list(_variable(environ, "SLURM_STEP_NODELIST"))
    tasks = expand_task_counts(_variable(environ, "SLURM_STEP_TASKS_PER_NODE"))
    rank, total = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    if len(nodes) != len(tasks) or sum(tasks) != total:
        raise ClusterError(
            f"Slurm's variables disagree: SLURM_STEP_NUM_TASKS is {total}, SLURM_STEP_NODELIST "
            f"names {len(nodes)} nodes, and SLURM_STEP_TASKS_PER_NODE lists {sum(tasks)} tasks on "
            f"{len(tasks)} nodes. Start the script directly with srun, or set TF_CONFIG."
        )
    if total > _MOST:
        raise ClusterError(f"SLURM_STEP_NUM_TASKS is {total}. Expected at most {_MOST}.")
    places = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    if rank >= total:
        raise ClusterError(
            f"SLURM_PROCID is {rank}. Expected a number below {total}, the value of "
            "SLURM_STEP_NUM_TASKS. Start the script directly with srun, or set TF_CONFIG."
        )
    _check_block_layout(environ, rank, places[rank])
    ports = _slurm_ports(environ, max(tasks))
    addresses = tuple(f"{nodes[node]}:{ports[local]}" for node, local in places)
    return Role(task_type="worker", index=rank, cluster={"worker": addresses}, source="Slurm")


def _check_block_layout(environ: Mapping[str, str], rank: int, place: tuple[int, int]) -> None:
    # Only with blocks can every task compute the nodes of the others.
    variables = ("SLURM_NODEID", "SLURM_LOCALID")
    for variable, expected in zip(variables, place, strict=True):
        if variable in environ and _number(environ, variable) != expected:
            raise ClusterError(
                f"Slurm task {rank} has {variable}={environ[variable]}, but block "
                f"distribution would give {expected}. Start it with `srun --distribution=block`."
            )


def _slurm_ports(environ: Mapping[str, str], count: int) -> list[int]:
    """Returns a port for every local rank: those that `srun --resv-ports` reserved, or else a range
    computed from the numbers of the job and the step, the same in all tasks.
    """
    reserved = environ.get("SLURM_STEP_RESV_PORTS")
    if reserved:
        ports = [int(port) for port in _expand_ranges(reserved, "SLURM_STEP_RESV_PORTS")]
        if len(ports) < count:
            raise ClusterError(
                f"The number of ports that SLURM_STEP_RESV_PORTS reserves is {len(ports)}, but "
                f"{count} tasks share a node. Start the step with `srun --resv-ports={count}`."
            )
        return ports[:count]
    job = _number(environ, "SLURM_JOB_ID")
    slot = (job + 97 * _number(environ, "SLURM_STEP_ID")) % _SLOTS
    first = _FIRST_PORT + slot * _SLOT_SIZE
    return list(range(first, first + count))


def expand_node_list(text: str) -> list[str]:
    """`"node[01-03,07],gpu5"` -> `["node01", "node02", "node03", "node07", "gpu5"]`."""
    parts = re.split(r",(?![^\[]*\])", text)  # not within brackets
    names = (name for part in parts for name in _expand_name(part))
    return _counted(names, "SLURM_STEP_NODELIST")


def expand_task_counts(text: str) -> list[int]:
    """`"2(x3),1"` -> `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if not found:
            received = repr(text) if _TASK_COUNTS.fullmatch(text) else shown(text)
            raise ClusterError(
                "SLURM_STEP_TASKS_PER_NODE, which srun sets, must look like '2(x3),1'. Received: "
                f"{received}. Start the script directly with srun, or set TF_CONFIG."
            )
        counts += [int(found[1])] * int(found[2] or 1)
        _counted(counts, "SLURM_STEP_TASKS_PER_NODE")
    return counts


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
    tails = _counted(_expand_name(after), "SLURM_STEP_NODELIST") if after else [""]
    for number in _expand_ranges(inside, "SLURM_STEP_NODELIST"):
        for tail in tails:
            yield f"{before}{number}{tail}"


def _expand_ranges(text: str, variable: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if not found or not 0 <= last - first < _MOST:
            raise ClusterError(
                f"{variable} has a range that cannot be read. Expected a number or an ascending "
                f"range, such as '07' or '01-03'. Received: {shown(part)}. {_REMEDY}"
            )
        width = len(found[1])
        numbers += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return numbers


def _counted(items: Iterable[T], variable: str) -> list[T]:
    """Returns `items` as a list, after a check that their number is possible in a cluster."""
    found = list(itertools.islice(items, _MOST + 1))
    if len(found) > _MOST:
        raise ClusterError(f"{variable} has more than {_MOST} entries. {_REMEDY}")
    return found


def _bad_node_list(text: str) -> ClusterError:
    return ClusterError(
        "SLURM_STEP_NODELIST must look like 'node[01-03,07],gpu5'. Received: "
        f"{shown(text)}. Start the script directly with srun, or set TF_CONFIG."
    )


def _variable(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ClusterError(
            f"This is a Slurm step with several tasks, but {name} is not set. Start the script "
            "directly with srun, or set TF_CONFIG."
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _variable(environ, name)
    if not text.isdecimal() or len(text) > 18:
        raise ClusterError(f"{name} must be a number. Received: {shown(text)}. {_REMEDY}")
    return int(text)
