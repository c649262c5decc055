"""The role of a SageMaker training container without TF_CONFIG.

SageMaker's toolkit sets TF_CONFIG only for jobs that request it, but always names the hosts. Not
verified on a machine of Amazon's: this follows its documentation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from keras_distplug.cluster.roles.role import Role, shown, single_process
from keras_distplug.core.errors import ClusterError

# Every container has its own host, so any port works that all of them know.
_PORT = 2222


def is_container(environ: Mapping[str, str]) -> bool:
    return "SM_HOSTS" in environ


def from_hosts(environ: Mapping[str, str]) -> Role:
    """Returns the role of a host. All hosts are workers, in the order of SM_HOSTS."""
    try:
        hosts = json.loads(environ["SM_HOSTS"])
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(map(_is_name, hosts)):
        raise ClusterError(
            'SM_HOSTS must be a JSON list of host names, such as ["algo-1", "algo-2"]. Received: '
            f"{shown(environ['SM_HOSTS'])}. Unset it if this process should not join a cluster."
        )
    if len(hosts) == 1:
        return single_process()
    here = environ.get("SM_CURRENT_HOST", "")
    if hosts.count(here) != 1:
        raise ClusterError(
            "SM_CURRENT_HOST must be in SM_HOSTS exactly once. Received: "
            f"{shown(here) if here else 'nothing'}; SM_HOSTS has {', '.join(map(shown, hosts))}. "
            "Set SM_CURRENT_HOST to the name of this host, or set TF_CONFIG, or unset SM_HOSTS if "
            "this process should not join a cluster."
        )
    addresses = tuple(f"{host}:{_PORT}" for host in hosts)
    return Role("worker", hosts.index(here), {"worker": addresses}, "SageMaker")


def _is_name(host: object) -> bool:
    return isinstance(host, str) and bool(host)
