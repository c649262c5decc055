"""The variables of clouds, as documented. None of this was run on a cloud's machine."""

from __future__ import annotations

import json

import pytest

from keras_distplug.cluster.roles import Role, from_environment, single_process
from keras_distplug.core.errors import ClusterError

POOLS = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": [f"cmle-training-workerpool1-ab-{n}:2222" for n in range(2)],
}
STEP = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def vertex(pools: object, task: object, **more: object) -> dict[str, str]:
    spec = {"cluster": pools, "environment": "cloud", "task": task, "open_ports": [3333], **more}
    return {"CLUSTER_SPEC": json.dumps(spec)}


def sagemaker(current: str | None, *hosts: str) -> dict[str, str]:
    found = {"SM_HOSTS": json.dumps(hosts), "SM_NUM_GPUS": "0"}
    return found if current is None else found | {"SM_CURRENT_HOST": current}


def test_tf_config_of_vertex() -> None:
    """Additional members of Vertex AI's TF_CONFIG make no difference."""
    found = {
        "cluster": {"chief": POOLS["workerpool0"], "worker": POOLS["workerpool1"]},
        "environment": "cloud",
        "task": {"type": "worker", "index": 1, "trial": "TRIAL_ID", "cloud": "an-id"},
        "job": '{"python_module":"","package_uris":[],"job_args":[]}',
    }
    role = from_environment({"TF_CONFIG": json.dumps(found)})
    assert (role.name, role.rank, role.world_size) == ("worker-1", 2, 3)


@pytest.mark.parametrize(
    ("task", "name", "rank", "is_chief"),
    [
        ({"type": "workerpool0", "index": 0, "trial": ""}, "chief-0", 0, True),
        ({"type": "workerpool1", "index": 0}, "worker-0", 1, False),
        ({"type": "workerpool1", "index": "1"}, "worker-1", 2, False),
    ],
)
def test_cluster_spec(task: object, name: str, rank: int, is_chief: bool) -> None:
    """Without TF_CONFIG the primary replica is the chief, those of the second pool are workers."""
    role = from_environment(vertex(POOLS, task, job="{}"))
    assert (role.name, role.rank, role.is_chief) == (name, rank, is_chief)
    assert (role.source, role.world_size) == ("Vertex AI", 3)
    assert json.loads(role.to_tf_config())["cluster"] == {
        "chief": POOLS["workerpool0"],
        "worker": POOLS["workerpool1"],
    }


def test_other_pools() -> None:
    """The third pool holds parameter servers; the fourth evaluators, outside the cluster; a pool
    may be empty."""
    pools = POOLS | {"workerpool2": ["p:2222"], "workerpool3": ["e:2222"]}
    evaluator = from_environment(vertex(pools, {"type": "workerpool3", "index": 0}))
    assert (evaluator.name, list(evaluator.cluster)) == ("evaluator-0", ["chief", "worker", "ps"])
    skipped = from_environment(
        vertex(POOLS | {"workerpool2": []}, {"type": "workerpool0", "index": 0})
    )
    assert list(skipped.cluster) == ["chief", "worker"]


@pytest.mark.parametrize(
    "environ",
    [
        vertex({"workerpool0": POOLS["workerpool0"]}, {"type": "workerpool0", "index": 0}),
        sagemaker("algo-1", "algo-1"),
        sagemaker(None, "algo-1"),
        {"CLUSTER_SPEC": "of something else"},
        {"CLUSTER_SPEC": '{"cluster": {"ps": ["a:1"]}}'},
    ],
    ids=["one replica", "one host", "one host, unnamed", "another variable", "another cluster"],
)
def test_alone(environ: dict[str, str]) -> None:
    """A job of one machine is a single process; a CLUSTER_SPEC of another system is ignored."""
    assert from_environment(environ) == single_process()


@pytest.mark.parametrize(
    ("pools", "task", "complaint"),
    [
        (POOLS, {"type": "workerpool1", "index": 2}, "the cluster lists 2 of that type"),
        (POOLS, {"type": "workerpool2", "index": 0}, "'ps', but the cluster has only: chief"),
        (
            POOLS,
            {"type": "workerpool9", "index": 0},
            "one of: workerpool0, .* Received: .workerpool9.",
        ),
        (POOLS, None, r"CLUSTER_SPEC\['task'\] must be an object.*a JSON null"),
        (POOLS | {"workerpool4": ["a:1"]}, {}, "unknown task type 'workerpool4'.*workerpool3"),
        ({"workerpool0": ["a"]}, {}, r"CLUSTER_SPEC.*workerpool0\[0\] has no valid address"),
        ({"workerpool0": ["a:1", "b:1"]}, {}, r"CLUSTER_SPEC.* has 2 chiefs"),
    ],
)
def test_impossible_cluster_spec(pools: object, task: object, complaint: str) -> None:
    """An impossible CLUSTER_SPEC is refused; the error uses CLUSTER_SPEC's own names."""
    with pytest.raises(ClusterError, match=f"(?i){complaint}"):
        from_environment(vertex(pools, task))


def test_broken_cluster_spec() -> None:
    """A truncated CLUSTER_SPEC is refused with an example of the expected form."""
    with pytest.raises(
        ClusterError, match=r"CLUSTER_SPEC is not valid JSON.*workerpool1.*unset it"
    ):
        from_environment({"CLUSTER_SPEC": '{"cluster": {"workerpool0"'})


def test_sagemaker() -> None:
    """Every host is a worker, all of them compute the same cluster, and the first is the chief."""
    hosts = ["algo-1", "algo-2", "algo-3"]
    roles = [from_environment(sagemaker(host, *hosts)) for host in hosts]
    addresses = tuple(f"{host}:2222" for host in hosts)
    assert roles[1] == Role("worker", 1, {"worker": addresses}, "SageMaker")
    assert [role.is_chief for role in roles] == [True, False, False]
    assert len({role.cluster["worker"] for role in roles}) == 1


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        (sagemaker(None, "algo-1", "algo-2"), "SM_CURRENT_HOST must be in SM_HOSTS exactly once"),
        (sagemaker("algo-3", "algo-1", "algo-2"), "'algo-3'; SM_HOSTS has 'algo-1', 'algo-2'"),
        (
            sagemaker("algo-1", "algo-1", "algo-1"),
            "SM_CURRENT_HOST must be in SM_HOSTS exactly once",
        ),
        (sagemaker("algo-1"), "SM_HOSTS must be a JSON list of host names"),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS must be a JSON list"),
        ({"SM_HOSTS": "[1, 2]", "SM_CURRENT_HOST": "1"}, "SM_HOSTS must be a JSON list"),
    ],
)
def test_sagemaker_nonsense(environ: dict[str, str], complaint: str) -> None:
    """Inconsistent hosts are refused, with the variable to set."""
    with pytest.raises(ClusterError, match=complaint):
        from_environment(environ)


def test_order() -> None:
    """TF_CONFIG takes precedence, then a Slurm step, CLUSTER_SPEC and SM_HOSTS."""
    replica = vertex(POOLS, {"type": "workerpool0", "index": 0})
    host = sagemaker("algo-1", "algo-1", "algo-2")
    assert from_environment(STEP | replica | host).source == "Slurm"
    assert from_environment(replica | host).source == "Vertex AI"
    assert from_environment(host).source == "SageMaker"
    assert from_environment(STEP | replica | host | {"TF_CONFIG": ""}) == single_process()


POD = {"KERAS_DISTPLUG_ADDRESS": "digits-worker-0-{index}.digits:2222"}


@pytest.mark.parametrize("workers", ["KERAS_DISTPLUG_WORKERS", "JAX_NUM_PROCESSES"])
def test_pod(workers: str) -> None:
    """The pods of an indexed Job are workers, as many as its manifest or Kubeflow Trainer says."""
    role = from_environment(POD | {workers: "3", "JOB_COMPLETION_INDEX": "2"})
    addresses = tuple(f"digits-worker-0-{index}.digits:2222" for index in range(3))
    assert role == Role("worker", 2, {"worker": addresses}, "Kubernetes")
    assert from_environment(POD | {workers: "1", "JOB_COMPLETION_INDEX": "0"}) == single_process()


def test_pod_with_its_own_cluster() -> None:
    """TF_CONFIG, as of a supervisor in the pod, comes first."""
    environ = POD | {"KERAS_DISTPLUG_WORKERS": "2", "JOB_COMPLETION_INDEX": "0", "TF_CONFIG": "{}"}
    assert from_environment(environ) == single_process()


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "KERAS_DISTPLUG_WORKERS must be a number from 1"),
        ({"KERAS_DISTPLUG_WORKERS": "2"}, "JOB_COMPLETION_INDEX must be a number.*nothing"),
        ({"KERAS_DISTPLUG_WORKERS": "0", "JOB_COMPLETION_INDEX": "0"}, "WORKERS must be.*'0'"),
        ({"KERAS_DISTPLUG_WORKERS": "9" * 30, "JOB_COMPLETION_INDEX": "0"}, "WORKERS must be"),
        ({"KERAS_DISTPLUG_WORKERS": "2", "JOB_COMPLETION_INDEX": "2"}, "there are 2 workers"),
        (
            {
                "KERAS_DISTPLUG_WORKERS": "2",
                "JOB_COMPLETION_INDEX": "0",
                "KERAS_DISTPLUG_ADDRESS": "digits:2222",
            },
            r"must be 'host:port' with {index} in it.*'digits:2222'",
        ),
        (
            {
                "KERAS_DISTPLUG_WORKERS": "2",
                "JOB_COMPLETION_INDEX": "0",
                "KERAS_DISTPLUG_ADDRESS": "digits-{index}",
            },
            "must be 'host:port'",
        ),
    ],
    ids=["workers", "index", "none", "many", "too high", "same", "no port"],
)
def test_impossible_pod(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ClusterError, match=complaint):
        from_environment(POD | environ)
