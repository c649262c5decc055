"""The role of a SageMaker training container without TF_CONFIG.

SageMaker's toolkit sets TF_CONFIG for jobs that ask it to; the hosts it names always. Not verified
on a machine of Amazon's: this follows its documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from keras_distplug.cluster.roles.role import Role, shown, single_process
from keras_distplug.core.errors import ClusterError

# Each container has its host to itself, so that any port does that all of them know.
_PORT = 2222


def is_container(environ: Mapping[str, str]) -> bool:
    return "SM_HOSTS" in environ


def from_hosts(environ: Mapping[str, str]) -> Role:
    """Every host is a worker, in the order in which all of them are told of each other."""
    try:
        hosts = json.loads(environ["SM_HOSTS"])
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(map(_is_name, hosts)):
        raise ClusterError(
            'SM_HOSTS must be a JSON list of host names, such as ["algo-1", "algo-2"]. Received: '
            f"{shown(environ['SM_HOSTS'])}. Unset it to train in a single process."
        )
    if len(hosts) == 1:
        return single_process()
    here = environ.get("SM_CURRENT_HOST", "")
    if hosts.count(here) != 1:
        raise ClusterError(
            f"SM_CURRENT_HOST must be one of SM_HOSTS. Received: {shown(here)}; SM_HOSTS has "
            f"{', '.join(map(shown, hosts))}. Set it, or TF_CONFIG, or unset SM_HOSTS to train in "
            "a single process."
        )
    addresses = tuple(f"{host}:{_PORT}" for host in hosts)
    return Role("worker", hosts.index(here), {"worker": addresses}, "SageMaker")


def _is_name(host: object) -> bool:
    return isinstance(host, str) and bool(host)
