"""Reads the role from TF_CONFIG, and from other variables in the same form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_distplug.cluster.roles.role import TASK_TYPES, Role, json_type, shown, single_process
from keras_distplug.core.errors import ClusterError


@dataclass(frozen=True)
class Form:
    """The form in which a variable describes the cluster.

    Args:
        variable: The name of the variable.
        task_types: TensorFlow's names of task types, by the names in the variable.
        source: The value of `Role.source`.
    """

    variable: str
    task_types: Mapping[str, str]
    source: str


TF_CONFIG = Form("TF_CONFIG", {name: name for name in TASK_TYPES}, "TF_CONFIG")


def from_tf_config(text: str) -> Role:
    """Returns the role in the text of TF_CONFIG. Empty or `{}` means a single process."""
    config = parse(text, TF_CONFIG) if text.strip() else {}
    return from_config(config, TF_CONFIG) if config else single_process()


def parse(text: str, form: Form) -> dict[str, Any]:
    """Returns the JSON object of the variable."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        first, second = list(form.task_types)[:2]
        example = {
            "cluster": {first: ["host0:2222"], second: ["host1:2222"]},
            "task": {"type": first, "index": 0},
        }
        raise ClusterError(
            f"{form.variable} is not valid JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}. Expected an object such as {json.dumps(example)}. Correct it, or "
            "unset it if this process should not join a cluster."
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f"{form.variable} must be a JSON object with 'cluster' and 'task'. Received: a JSON "
            f"{json_type(config)}."
        )
    return config


def from_config(config: Mapping[str, Any], form: Form) -> Role:
    """Returns the role in the members 'cluster' and 'task'. Other members are ignored."""
    cluster = _read_cluster(_member(config, "cluster", form.variable, form), form)
    task = _member(config, "task", form.variable, form)
    where = f"{form.variable}['task']"
    if not isinstance(task, dict):
        raise ClusterError(
            f"{where} must be an object with 'type' and 'index'. Received: a JSON "
            f"{json_type(task)}."
        )
    task_type = _member(task, "type", where, form)
    index = _member(task, "index", where, form)
    if isinstance(index, str) and index.isdecimal():
        index = int(index)  # TensorFlow takes "1" for 1, and so do some schedulers.
    if not isinstance(task_type, str) or task_type not in form.task_types:
        raise ClusterError(
            f"The task's type, from {form.source}, must be one of: {', '.join(form.task_types)}. "
            f"Received: {shown(task_type)}."
        )
    task_type = form.task_types[task_type]
    return Role(task_type=task_type, index=index, cluster=cluster, source=form.source)


def _member(found: Mapping[str, Any], key: str, where: str, form: Form) -> Any:
    if key not in found:
        raise ClusterError(
            f"{where} has no {key!r}. Every process needs the whole cluster and its own task: set "
            f"{key!r}, or unset {form.variable} if this process should not join a cluster."
        )
    return found[key]


def _read_cluster(found: Any, form: Form) -> dict[str, tuple[str, ...]]:
    where = f"{form.variable}['cluster']"
    if not isinstance(found, dict) or not found:
        received = f"a JSON {json_type(found)}" if not isinstance(found, dict) else "{}"
        raise ClusterError(
            f"{where} must be an object that maps task types to lists of addresses. Received: "
            f"{received}. Unset {form.variable} if this process should not join a cluster."
        )
    for task_type, addresses in found.items():
        if task_type not in form.task_types:
            raise ClusterError(
                f"{where} has the unknown task type {shown(task_type)}. "
                f"Expected: {', '.join(form.task_types)}."
            )
        if not isinstance(addresses, list) or not addresses:
            received = "[]" if addresses == [] else f"a JSON {json_type(addresses)}"
            raise ClusterError(
                f"{where}[{task_type!r}] must be a list of at least one 'host:port'. "
                f"Received: {received}. Omit {task_type!r} if the cluster has none."
            )
    _check_addresses(found, where)
    cluster = {form.task_types[name]: tuple(addresses) for name, addresses in found.items()}
    if len(cluster.get("chief", ())) > 1:
        raise ClusterError(
            f"{where} has {len(cluster['chief'])} chiefs. Expected one at most: list the others "
            "as workers."
        )
    if not {"chief", "worker"} & cluster.keys():
        raise ClusterError(
            f"{where} has neither a chief nor a worker, so no process trains. Received task types: "
            f"{', '.join(found)}."
        )
    return cluster


def _check_addresses(cluster: Mapping[str, Sequence[Any]], where: str) -> None:
    owners: dict[str, str] = {}
    for task_type, addresses in cluster.items():
        for index, address in enumerate(addresses):
            here = f"{task_type}[{index}]"
            if not is_address(address):
                raise ClusterError(
                    f"{where}: {here} has no valid address. Expected 'host:port' with a port from "
                    "1 to 65535. Put an IPv6 address in brackets, as in '[::1]:2222'. Received: "
                    f"{shown(address)}."
                )
            if address in owners:
                raise ClusterError(
                    f"{where}: {owners[address]} and {here} have the same address "
                    f"{shown(address)}. Give every task its own port."
                )
            owners[address] = here


def is_address(address: Any) -> bool:
    """True for 'host:port' with a valid port."""
    if not isinstance(address, str):
        return False
    host, _, port = address.rpartition(":")
    is_bare = not set(host) & set(":[]")  # a name, or an IPv4 address
    is_bracketed = host.startswith("[") and host.endswith("]") and len(host) > len("[]")
    is_host = bool(host.strip()) and (is_bare or is_bracketed)
    return is_host and port.isdecimal() and 0 < int(port) < 65536
