"""State that differs between replicas or workers: metrics of the current epoch, random states."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_distplug.backend.tensorflow.replicas import replica_values
from keras_distplug.backend.tensorflow.replicas.touched import Touched
from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.cluster.channel import Channel
from keras_distplug.cluster.roles import Role
from keras_distplug.core.log import announce
from keras_distplug.python_state import random_states

PREFIX = "replicas/"
DRAWS = "draws"  # the states of random operations


@dataclass(frozen=True)
class OwnStates:
    """The states of all replicas and workers, the same on every worker.

    Args:
        arrays: The values of every replica's variables, as `replicas/<replica>/<variable>`.
        random: The random generators of every worker; on the chief only, unless all workers need
            them.
    """

    arrays: Mapping[str, Any] = field(default_factory=dict)
    random: tuple[Mapping[str, Any], ...] = ()


def capture(
    model: keras.Model,
    agreement: Channel,
    world_size: int,
    *,
    in_epoch: bool,
    random_for_all: bool = True,
) -> OwnStates:
    """Captures the states of all workers, which must call this together.

    Args:
        model: The model in training.
        agreement: The channel between the workers.
        world_size: The number of workers.
        in_epoch: True if metrics are included: they are reset at the start of every epoch.
        random_for_all: True if all workers need to know each other's random generators, and not
            only the chief, which writes the manifest.
    """
    names, variables = _named(model, in_epoch=in_epoch)
    random = {**random_states.capture(), DRAWS: Touched.of(model).draws.states()}
    of_all = gather(variables, agreement, world_size)
    if world_size == 1:
        return OwnStates(_by_replica(names, of_all), (random,))
    message = json.dumps(random)
    ask = agreement.gather if random_for_all else agreement.gather_on_chief
    gathered = ask("random", message) or []
    return OwnStates(_by_replica(names, of_all), tuple(map(json.loads, gathered)))


def gather(
    variables: Sequence[Any], agreement: Channel, world_size: int
) -> Sequence[Sequence[Any]]:
    """Returns, for every variable, its values on the replicas of all workers."""
    mine = [replica_values.parts(variable) for variable in variables]
    if world_size == 1 or not variables:
        return mine
    received = [_unpacked(each, mine) for each in agreement.gather("own states", _packed(mine))]
    return [
        [np.array(part) for theirs in received for part in theirs[str(place)]]
        for place in range(len(variables))
    ]


def restore(
    model: keras.Model,
    arrays: Mapping[str, np.ndarray],
    role: Role,
    *,
    in_epoch: bool,
    with_metrics: bool = True,
) -> Callable[[], None]:
    """Restores the values of this worker's replicas, also of variables that the first step
    creates.

    Args:
        model: The model in training.
        arrays: The `OwnStates.arrays`.
        role: This worker's role.
        in_epoch: The value given to `capture`.
        with_metrics: False if the metrics of the epoch start from scratch.

    Returns:
        A function to call after the epoch's steps, which reports metrics that do not match.
    """
    is_eager = models.runs_eagerly(model)
    counting: set[int] = set()
    differs: str | None = None

    def restore() -> bool:
        nonlocal differs
        if not with_metrics:
            counting.update(map(id, model.metrics_variables))
        differs = restore_existing(
            model, arrays, role.rank, role.world_size, in_epoch=in_epoch, counting=counting
        )
        if is_eager:
            counting.update(_existing(model))
        return differs is None

    def finish() -> None:
        nonlocal differs
        replica_values.stop_waiting(model)
        if differs is not None and role.is_chief and in_epoch:
            announce(
                "some metrics of this epoch do not cover the batches before the checkpoint: the "
                f"metrics {differs}"
            )
        differs = None

    if not restore() and not replica_values.when_built(model, restore):
        finish()
    return finish


def restore_existing(
    model: keras.Model,
    arrays: Mapping[str, np.ndarray],
    rank: int,
    world_size: int,
    *,
    in_epoch: bool,
    counting: Collection[int] = (),
) -> str | None:
    """Restores the values of this worker's replicas.

    If the number of replicas has changed, a variable's values are combined according to its
    `aggregation`. For a sum, such as the counts of metrics, the first replica gets the total.

    Args:
        model: The model in training, with all its variables.
        arrays: The `OwnStates.arrays`.
        rank: This worker's rank.
        world_size: The number of workers.
        in_epoch: The value given to `capture`.
        counting: The `id` of every variable to leave as is, because a running step changed it.

    Returns:
        A description of the mismatch; None if everything matches. Variables with a matching path
        are restored anyway, because the others may not exist yet.
    """
    _, variables = _named(model, in_epoch=in_epoch)
    replicas: dict[int, list[np.ndarray]] = {}
    for key, array in arrays.items():
        replicas.setdefault(int(key.removeprefix(PREFIX).split("/")[0]), []).append(array)
    stored = [replicas[n] for n in sorted(replicas)]
    shapes = [tuple(variable.shape) for variable in variables]
    if any([array.shape for array in values] != shapes for values in stored or [[]]):
        paths = [key.split("/", 3)[-1] for key in arrays if key.startswith(f"{PREFIX}0000/")]
        for variable in variables:
            if paths.count(variable.path) == 1 and id(variable) not in counting:
                values = [each[paths.index(variable.path)] for each in stored]
                assign(variable, values, rank, world_size)
        there = [array.shape for array in stored[0]] if stored else []
        if len(there) != len(shapes):
            return f"had {len(there)} variables at the checkpoint and now have {len(shapes)}"
        return f"had variables of shapes {there} at the checkpoint and now have {shapes}"
    for place, variable in enumerate(variables):
        if id(variable) not in counting:
            assign(variable, [each[place] for each in stored], rank, world_size)
    return None


def _existing(model: keras.Model) -> set[int]:
    """Returns the `id` of the variables that `restore` would assign."""
    return {id(variable) for variable in _named(model, in_epoch=True)[1]}


def assign(variable: Any, values: Sequence[np.ndarray], rank: int, world_size: int) -> None:
    """Assigns this worker's share of a variable's values to its replicas."""
    if any(value.shape != tuple(variable.shape) for value in values):
        return
    here = len(replica_values.parts(variable))
    if len(values) == here * world_size:
        mine = values[rank * here : (rank + 1) * here]
    else:
        mine = _redistribute(values, replica_values.aggregation(variable), here, is_first=rank == 0)
    replica_values.set_parts(variable, mine)


def _redistribute(
    values: Sequence[np.ndarray], aggregation: str, replicas: int, *, is_first: bool
) -> list[np.ndarray]:
    """Returns the values for replicas if the number of replicas has changed."""
    if aggregation == "sum":
        total = np.sum(values, axis=0, dtype=values[0].dtype)
        return [total if is_first and n == 0 else np.zeros_like(total) for n in range(replicas)]
    if aggregation == "mean":
        return [np.mean(values, axis=0).astype(values[0].dtype)] * replicas
    return [values[0]] * replicas


def _named(model: keras.Model, *, in_epoch: bool) -> tuple[list[str], list[keras.Variable]]:
    metrics = {id(variable) for variable in model.metrics_variables}
    variables = [
        variable
        for variable in replica_values.own_of_replicas(model)
        if in_epoch or id(variable) not in metrics
    ]
    return [f"{place:03}/{variable.path}" for place, variable in enumerate(variables)], variables


def _by_replica(names: Sequence[str], values: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {
        f"{PREFIX}{replica:04}/{name}": part
        for name, parts in zip(names, values, strict=True)
        for replica, part in enumerate(parts)
    }


def _packed(parts: Sequence[Sequence[Any]]) -> str:
    """Returns the values of one worker's replicas, one replica after the other, without metadata:
    in a large cluster, every worker's message is sent to all others."""
    values = [part for of_replica in zip(*parts, strict=True) for part in of_replica]
    return base64.b64encode(b"".join(np.asarray(each).tobytes() for each in values)).decode()


def _unpacked(message: str, mine: Sequence[Sequence[Any]]) -> np.ndarray:
    """The inverse of `_packed`: returns a row per replica, with variables by position. Types and
    shapes are those of this worker."""
    firsts = [np.asarray(parts[0]) for parts in mine]
    row = np.dtype([(str(place), each.dtype, each.shape) for place, each in enumerate(firsts)])
    return np.frombuffer(base64.b64decode(message), row)
