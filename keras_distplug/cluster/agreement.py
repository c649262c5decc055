"""The role of a process under a strategy, and its channel to the other workers."""

from __future__ import annotations

from typing import Any

from keras_distplug.cluster.channel import Channel
from keras_distplug.cluster.roles import Role, single_process
from keras_distplug.core.errors import AgreementError


def get_role(strategy: Any) -> Role:
    """Returns this process's role under `strategy`, a `tf.distribute.Strategy`."""
    from keras_distplug.backend.tensorflow.runtime import workers  # loads TensorFlow

    if not workers.is_multi_worker(strategy) and not workers.is_scheduled(strategy):
        return single_process()
    resolver = workers.get_resolver(strategy)
    cluster = {job: tuple(tasks) for job, tasks in resolver.cluster_spec().as_dict().items()}
    return Role(resolver.task_type, resolver.task_id, cluster, source="the strategy")


def get_channel(role: Role) -> Channel:
    """Returns the channel between the workers of `role`'s cluster."""
    if role.world_size == 1:
        return Channel(role, _NoPeers())
    from keras_distplug.backend.tensorflow.runtime.context import (
        ServiceKeyValues,  # loads TensorFlow
    )

    return Channel(role, ServiceKeyValues())


def alone() -> Channel:
    """Returns the channel of a single process, which agrees with itself."""
    return get_channel(single_process())


class _NoPeers:
    """The store of a single process. It keeps nothing, because no other process reads it."""

    def put_first(self, key: str, value: str) -> bool:
        return True

    def get(self, key: str, timeout_s: float | None) -> str:
        raise AgreementError(
            f"Expected no wait for {key!r}: this process trains alone, so no other worker can send "
            "it. This is a bug in keras_distplug: report this message."
        )

    def delete(self, key: str) -> None:
        return

    def barrier(self, key: str, timeout_s: float) -> None:
        return
