"""Starts the processes of one attempt, each with its environment, and any of them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from keras_distplug.cluster.roles import Role
from keras_distplug.core.supervised import Supervised
from keras_distplug.supervisor.fork_server import ForkServer
from keras_distplug.supervisor.group import Group
from keras_distplug.supervisor.launch import worker_environment


class Launcher:
    """Starts processes of an attempt.

    Args:
        group: Which takes care of them.
        fork_server: Starts them.
        roles: Of all of them.
        contract: What they report to.
        environ: What all have in their environment.
        gpus: Those of each worker; None when there are none to give.
    """

    def __init__(
        self,
        group: Group,
        fork_server: ForkServer,
        roles: Sequence[Role],
        contract: Supervised,
        environ: Mapping[str, str],
        gpus: Sequence[Sequence[str]] | None,
    ) -> None:
        self._group = group
        self._fork_server = fork_server
        self._roles = {role.name: role for role in roles}
        self._contract = contract
        self._environ = environ
        self._gpus = gpus

    def start(self, name: str) -> bool:
        """Starts one; whether it was forked."""
        started, is_forked = self._fork_server.start(self._environment(self._roles[name]))
        self._group.add(name, started)
        return is_forked

    def _environment(self, role: Role) -> dict[str, str]:
        if role.task_type == "worker":
            own = None if self._gpus is None else self._gpus[role.index]
            return worker_environment(self._environ, role, self._contract, own)
        # A chief and parameter servers compute little: the devices are the workers'.
        contract = replace(self._contract, devices_per_worker=None)
        none = None if self._gpus is None else ()
        return worker_environment(self._environ, role, contract, none)
