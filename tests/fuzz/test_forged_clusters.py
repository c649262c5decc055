"""Forged environments."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from fuzz.mutations import mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_distplug.cluster import roles
from keras_distplug.core.errors import ClusterError

LIMITS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
CONFIG = {
    "cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]},
    "task": {"type": "worker", "index": 1},
}
VERTEX = {
    "cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:2"]},
    "task": {"type": "workerpool1", "index": 0, "trial": None},
    "environment": "cloud",
}


def role_from(**environ: str) -> None:
    """Creates a role with usable properties, or gets an error of ours."""
    with contextlib.suppress(ClusterError):
        role = roles.from_environment(environ)
        # With parameter servers, only the chief trains.
        assert role.name in role.workers or role.task_type == "evaluator" or "ps" in role.cluster
        assert role.rank >= 0
        assert role.world_size == len(role.workers)
        json.loads(role.to_tf_config())


@LIMITS
@given(st.text())
def test_any_text(text: str) -> None:
    for name in ("TF_CONFIG", "CLUSTER_SPEC", "SM_HOSTS", "SLURM_STEP_NODELIST"):
        role_from(**{name: text})


@LIMITS
@given(mutated(CONFIG))
def test_tf_config(config: Any) -> None:
    role_from(TF_CONFIG=json.dumps(config))


@LIMITS
@given(mutated(VERTEX))
def test_vertex(config: Any) -> None:
    role_from(CLUSTER_SPEC=json.dumps(config))


@LIMITS
@given(mutated(["algo-1", "algo-2"]), st.one_of(st.just("algo-1"), st.text(max_size=8)))
def test_sagemaker(hosts: Any, current: str) -> None:
    role_from(SM_HOSTS=json.dumps(hosts), SM_CURRENT_HOST=current)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


@LIMITS
@given(
    st.dictionaries(
        st.sampled_from(sorted(SLURM)),
        st.one_of(st.text(max_size=12), st.sampled_from(["node[1-99999999999]", "1(x999999999)"])),
        max_size=3,
    )
)
def test_slurm(changed: dict[str, str]) -> None:
    role_from(**(SLURM | changed))
