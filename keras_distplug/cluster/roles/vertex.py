"""The role of a replica of a Vertex AI custom job without TF_CONFIG.

Vertex AI sets TF_CONFIG as well as CLUSTER_SPEC, which has the same form, but calls tasks by their
worker pools. Not verified on a machine of Google's: this follows its documentation.
"""

from __future__ import annotations

from collections.abc import Mapping

from keras_distplug.cluster.roles.role import Role, single_process
from keras_distplug.cluster.roles.tf_config import Form, from_config, parse

_FORM = Form(
    "CLUSTER_SPEC",
    {
        "workerpool0": "chief",
        "workerpool1": "worker",
        "workerpool2": "ps",
        "workerpool3": "evaluator",
    },
    "Vertex AI",
)


def is_replica(environ: Mapping[str, str]) -> bool:
    """True if CLUSTER_SPEC is from Vertex AI: others may use a variable of this name."""
    return '"workerpool0"' in environ.get("CLUSTER_SPEC", "")


def from_cluster_spec(text: str) -> Role:
    """Returns the role of a replica: the primary one is the chief, or a single process."""
    config = parse(text, _FORM)
    pools = config.get("cluster")
    if isinstance(pools, dict):
        # A pool may be empty. Evaluators are outside the cluster, as in TF_CONFIG.
        pools = {name: pool for name, pool in pools.items() if pool and name != "workerpool3"}
        config = config | {"cluster": pools}
    role = from_config(config, _FORM)
    return single_process() if role.cluster.keys() == {"chief"} else role
