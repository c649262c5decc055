from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keras_distplug.cluster.roles import Role, from_environment, require_not_numbered
from keras_distplug.cluster.roles.slurm import expand_node_list, expand_task_counts
from keras_distplug.core.errors import ClusterError

ROOT = Path(__file__).resolve().parents[2]
TWO = {"worker": ["a:1", "b:2"]}


def tf_config(cluster: object, task: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def srun(**changes: str) -> dict[str, str]:
    step = {
        "SLURM_JOB_ID": "1000",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "4",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_NODELIST": "node[01-02,07],gpu5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    }
    return step | changes


def test_worker_of_tf_config() -> None:
    """TF_CONFIG names the task, its index and the cluster."""
    role = from_environment(tf_config(TWO, {"type": "worker", "index": 1}))
    assert role == Role("worker", 1, {"worker": ("a:1", "b:2")}, "TF_CONFIG")
    assert (role.name, role.world_size, role.is_chief) == ("worker-1", 2, False)


def test_worker_0_is_chief_without_a_chief() -> None:
    """Worker 0 is the chief of a cluster that has no chief task."""
    assert from_environment(tf_config(TWO, {"type": "worker", "index": 0})).is_chief


def test_chief_task_is_chief() -> None:
    """The chief task is the chief, worker 0 is not, and the chief counts as one that trains."""
    cluster = {"chief": ["c:1"], **TWO}
    chief = from_environment(tf_config(cluster, {"type": "chief", "index": 0}))
    worker = from_environment(tf_config(cluster, {"type": "worker", "index": 0}))
    assert (chief.is_chief, worker.is_chief, worker.world_size) == (True, False, 3)


def test_ps_is_never_chief() -> None:
    """A parameter server is never the chief, not even number 0 of a cluster without one."""
    cluster = {**TWO, "ps": ["p:1"]}
    assert not from_environment(tf_config(cluster, {"type": "ps", "index": 0})).is_chief


def test_evaluator_outside_the_cluster() -> None:
    """The evaluator need not be listed in the cluster."""
    role = from_environment(tf_config(TWO, {"type": "evaluator", "index": 0}))
    assert (role.name, role.is_chief) == ("evaluator-0", False)


def test_address_of_ipv6() -> None:
    """IPv6 addresses are in brackets."""
    cluster = {"worker": ["[::1]:1", "[fe80::1]:2"]}
    assert from_environment(tf_config(cluster, {"type": "worker", "index": 0})).world_size == 2


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "4"},
    ],
)
def test_numbered_by_a_launcher(environ: dict[str, str]) -> None:
    """One of several processes without the addresses of the others is refused, unless the
    environment declares it a single process."""
    with pytest.raises(ClusterError, match=r"one of [24] .*keras-distplug run --workers [24]"):
        require_not_numbered(environ)
    size = next(name for name in environ if name.endswith("SIZE"))
    role = {"type": "worker", "index": 0}
    for other in (
        {"TF_CONFIG": "{}"},
        {"KERAS_DISTPLUG_JOB": "a job"},
        tf_config({"worker": ["a:1", "b:1"]}, role),
        {size: "1"},
    ):
        require_not_numbered({**environ, **other})


def test_index_in_quotes() -> None:
    """The index "1" counts as 1, as in TensorFlow."""
    assert from_environment(tf_config(TWO, {"type": "worker", "index": "1"})).index == 1


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " {} "}])
def test_single_process(environ: dict[str, str]) -> None:
    """Without TF_CONFIG, or with an empty one, this is a single process and its own chief."""
    role = from_environment(environ)
    assert role == Role("worker", 0, {}, "single process")
    assert (role.is_chief, role.world_size, role.to_tf_config()) == (True, 1, "{}")


def test_empty_tf_config_overrules_slurm() -> None:
    """An empty TF_CONFIG means a single process, inside a Slurm step, too."""
    assert from_environment(srun(TF_CONFIG="{}")).world_size == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{not json", "not valid JSON: .* line 1, column 2"),
        ("[1]", "must be a JSON object .* a JSON array"),
        ('"x"', "must be a JSON object .* a JSON string"),
        ('{"task": {"type": "worker", "index": 0}}', "TF_CONFIG has no 'cluster'"),
        ('{"cluster": {"worker": ["a:1"]}}', "TF_CONFIG has no 'task'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": 3}', "'task'.* must be an object"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', "has no 'type'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', "has no 'index'"),
    ],
)
def test_malformed(text: str, complaint: str) -> None:
    """A malformed TF_CONFIG is refused, with the part that is wrong."""
    with pytest.raises(ClusterError, match=complaint):
        from_environment({"TF_CONFIG": text})


@pytest.mark.parametrize(
    ("cluster", "complaint"),
    [
        ({}, "must be an object that maps task types.*Received: {}"),
        (["a:1"], "must be an object that maps task types.*a JSON array"),
        ({"worker": []}, r"'worker'.* at least one .*Received: \[\]"),
        ({"worker": "a:1"}, "must be a list.*a JSON string"),
        ({"worker": ["a"]}, r"worker\[0\] has no valid address.*'a'"),
        ({"worker": ["a:1", "b:"]}, r"worker\[1\] has no valid address"),
        ({"worker": [":1"]}, "no valid address"),
        ({"worker": ["a:65536"]}, "no valid address"),
        ({"worker": [7]}, "no valid address.*7"),
        ({"worker": ["::1:34011"]}, r"worker\[0\] has no valid address.*in brackets"),
        ({"worker": ["[]:1"]}, "no valid address"),
        ({"worker": ["a:1"], "ps": ["a:1"]}, r"worker\[0\] and ps\[0\] have the same address"),
        ({"chief": ["c:1", "c:2"], "worker": ["a:1"]}, "has 2 chiefs"),
        ({"worker": ["a:1"], "master": ["m:1"]}, "unknown task type 'master'"),
        ({"ps": ["p:1"]}, "neither a chief nor a worker"),
    ],
)
def test_impossible_cluster(cluster: object, complaint: str) -> None:
    """An impossible cluster is refused, with the entry that is wrong."""
    with pytest.raises(ClusterError, match=complaint):
        from_environment(tf_config(cluster, {"type": "worker", "index": 0}))


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ({"type": "chief", "index": 0}, "'chief', but the cluster has only: worker"),
        ({"type": "gpu", "index": 0}, "must be one of: .* Received: 'gpu'"),
        ({"type": "worker", "index": 2}, "the cluster lists 2 of that type"),
        ({"type": "worker", "index": -1}, "int >= 0. Received: -1"),
        ({"type": "worker", "index": 0.5}, "int >= 0. Received: 0.5"),
        ({"type": "worker", "index": True}, "int >= 0. Received: True"),
        ({"type": "worker", "index": None}, "int >= 0. Received: None"),
        ({"type": ["worker"], "index": 0}, "must be one of: .* Received: a JSON array"),
    ],
)
def test_impossible_task(task: object, complaint: str) -> None:
    """A task outside the cluster is refused, with the expected values."""
    with pytest.raises(ClusterError, match=complaint):
        from_environment(tf_config(TWO, task))


@pytest.mark.parametrize(
    "text",
    [
        '{"password": "hunter2"',
        '{"cluster": {"worker": ["https://me:hunter2@host"]}, "task": {}}',
        '{"cluster": {"key=hunter2": ["a:1"]}, "task": {}}',
    ],
)
def test_errors_keep_secrets(text: str) -> None:
    """Errors never repeat text that does not look like an address or a name."""
    with pytest.raises(ClusterError) as caught:
        from_environment({"TF_CONFIG": text})
    assert "hunter2" not in str(caught.value)


def test_tf_config_round_trip() -> None:
    """`to_tf_config` is the inverse of reading TF_CONFIG."""
    role = from_environment(
        tf_config({"chief": ["[::1]:1"], **TWO}, {"type": "worker", "index": 1})
    )
    assert from_environment({"TF_CONFIG": role.to_tf_config()}) == role


def test_slurm_step() -> None:
    """The tasks of an srun step are workers, in blocks over the nodes, with one port per task."""
    role = from_environment(srun())
    hosts = [address.split(":")[0] for address in role.cluster["worker"]]
    assert hosts == ["node01", "node01", "node02", "node02", "node07", "node07", "gpu5"]
    assert (role.name, role.source, role.world_size) == ("worker-4", "Slurm", 7)
    assert len(set(role.cluster["worker"])) == 7


def test_slurm_tasks_see_one_cluster() -> None:
    """All tasks of a step arrive at the same addresses; another job arrives at other ports."""
    mine, peer = from_environment(srun()), from_environment(srun(SLURM_PROCID="0"))
    other = from_environment(srun(SLURM_JOB_ID="1001"))
    assert mine.cluster == peer.cluster
    assert not set(mine.cluster["worker"]) & set(other.cluster["worker"])


@pytest.mark.parametrize("job", ["1", "749", "750", "4294967295"])
def test_slurm_ports_below_the_ephemeral_range(job: str) -> None:
    """Ports that Slurm did not reserve are outside the range of outgoing connections."""
    cluster = from_environment(srun(SLURM_JOB_ID=job)).cluster
    ports = {int(address.split(":")[1]) for address in cluster["worker"]}
    assert min(ports) >= 20000
    assert max(ports) < 32768


def test_slurm_reserved_ports() -> None:
    """Ports that srun reserved are used, one for every task of a node."""
    role = from_environment(srun(SLURM_STEP_RESV_PORTS="12005,12010-12011"))
    assert role.cluster["worker"][:3] == ("node01:12005", "node01:12010", "node02:12005")


def test_too_few_reserved_ports() -> None:
    """Fewer reserved ports than tasks on a node: the error names the option to pass."""
    with pytest.raises(ClusterError, match="--resv-ports=2"):
        from_environment(srun(SLURM_STEP_RESV_PORTS="12005"))


@pytest.mark.parametrize(
    "outside",
    [
        {"SLURM_STEP_ID": "4294967290"},
        {"SLURM_STEP_ID": "4294967291"},
        {"SLURM_STEP_ID": "4294967295"},
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_not_an_srun_step(outside: dict[str, str]) -> None:
    """In sbatch or salloc without srun, or in a step of one task, this is a single process."""
    assert from_environment(srun(**outside)).source == "single process"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "disagree: SLURM_STEP_NUM_TASKS is 8"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "disagree"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, r"must look like '2\(x3\),1'"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({"SLURM_STEP_NODELIST": "node[1-"}, "must look like"),
        ({"SLURM_STEP_NODELIST": "node[3-1]"}, "range that cannot be read"),
        ({"SLURM_PROCID": "7"}, "Expected a number below 7"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be a number"),
        ({"SLURM_NODEID": "0"}, "--distribution=block"),
        ({"SLURM_LOCALID": "1"}, "--distribution=block"),
    ],
)
def test_slurm_nonsense(changes: dict[str, str], complaint: str) -> None:
    """Inconsistent Slurm variables are refused, with a remedy."""
    with pytest.raises(ClusterError, match=complaint):
        from_environment(srun(**changes))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("a,b", ["a", "b"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-10]-ib,x[2,4]", ["n9-ib", "n10-ib", "x2", "x4"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_node_list(text: str, names: list[str]) -> None:
    """Slurm's brackets stand for every number in them, with its leading zeros."""
    assert expand_node_list(text) == names


def test_task_counts() -> None:
    """`2(x3),1` stands for three nodes of two tasks and one of one."""
    assert expand_task_counts("2(x3),1") == [2, 2, 2, 1]


def test_no_tensorflow() -> None:
    """Reading the role loads neither TensorFlow nor Keras."""
    code = "import sys, keras_distplug.cluster.roles as r; r.from_environment({}); "
    code += "assert not {'tensorflow', 'keras'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
