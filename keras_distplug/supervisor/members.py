"""Who trains in a group, and who serves those that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from keras_distplug.cluster.roles import Role


@dataclass(frozen=True)
class Members:
    """The names of an attempt's processes.

    Args:
        trainers: Whose completion is that of the job: all workers, or the chief of a group with
            parameter servers.
        servers: The other ones of such a group: workers, which compute for the chief and keep
            nothing, and parameter servers, which keep the variables.
    """

    trainers: tuple[str, ...]
    servers: tuple[str, ...] = ()

    @classmethod
    def of(cls, roles: Sequence[Role]) -> Self:
        if not any(role.task_type == "ps" for role in roles):
            return cls(tuple(role.name for role in roles))
        chief, *servers = (role.name for role in roles)
        return cls((chief,), tuple(servers))

    @property
    def names(self) -> tuple[str, ...]:
        return self.trainers + self.servers

    @property
    def replaceable(self) -> tuple[str, ...]:
        """Without whom the others go on until it is there again."""
        return tuple(name for name in self.servers if name.startswith("worker-"))
