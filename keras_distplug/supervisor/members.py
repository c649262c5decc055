"""The processes of a group: those that train, and those that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from keras_distplug.cluster.roles import Role


@dataclass(frozen=True)
class Members:
    """The names of an attempt's processes.

    Args:
        trainers: Processes that must complete training to complete the job: all workers, or the
            chief of a group with parameter servers.
        servers: Other processes of a group with parameter servers: workers, which compute for the
            chief and are stateless, and parameter servers, which hold the variables. Defaults to
            none.
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
        """Processes that can be restarted while the others continue."""
        return tuple(name for name in self.servers if name.startswith("worker-"))
