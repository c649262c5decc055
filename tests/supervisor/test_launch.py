from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from keras_distplug.cluster.roles import Role
from keras_distplug.core import supervised
from keras_distplug.core.errors import ClusterError, ConfigurationError
from keras_distplug.core.supervised import Supervised
from keras_distplug.supervisor.launch import (
    CommandNotFoundError,
    check_command,
    common_environment,
    divide_gpus,
    free_ports,
    local_cluster,
    refuse_foreign_cluster,
    spawn,
    visible_gpus,
    worker_environment,
)

CONTRACT = Supervised(job="j", attempt=2, status_dir=Path("/s"))


def test_free_ports() -> None:
    """Ports are free and distinct, and those of the previous attempt are avoided."""
    before = free_ports(50)
    ports = free_ports(50, avoid=before)
    assert len({*before, *ports}) == 100
    for port in ports[:5]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_local_cluster() -> None:
    """Every worker gets the same cluster and its own place in it."""
    roles = local_cluster([1001, 1002])
    assert [role.name for role in roles] == ["worker-0", "worker-1"]
    assert roles[0].cluster == {"worker": ("127.0.0.1:1001", "127.0.0.1:1002")}
    assert roles[0].cluster == roles[1].cluster


def test_worker_environment() -> None:
    """A worker gets its TF_CONFIG, the contract, unbuffered output and its GPUs."""
    role = local_cluster([1001, 1002])[1]
    common = common_environment({"HOME": "/h", supervised.FORK_SERVER: "/another/one"})
    assert supervised.FORK_SERVER not in common
    environ = worker_environment(common, role, CONTRACT, gpus=[("0", "1"), ("2", "3")])
    assert json.loads(environ["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert Supervised.from_env(environ) == CONTRACT
    assert (environ["HOME"], environ["PYTHONUNBUFFERED"]) == ("/h", "1")
    assert (environ["TF_CPP_MIN_LOG_LEVEL"], environ["CUDA_VISIBLE_DEVICES"]) == ("2", "2,3")


def test_environment_without_devices() -> None:
    """A chief and parameter servers get no devices."""
    chief, worker, ps = local_cluster([1001, 1002, 1003], ps=1)
    for role, gpus, devices in ((chief, "", None), (worker, "2,3", 2), (ps, "", None)):
        environ = worker_environment({}, role, Supervised("j", 0, Path(), 2), [("2", "3")])
        contract = Supervised.from_env(environ)
        assert contract is not None
        assert (environ["CUDA_VISIBLE_DEVICES"], contract.devices_per_worker) == (gpus, devices)


def test_single_worker_has_no_tf_config() -> None:
    """A single worker forms no cluster: an existing TF_CONFIG is removed."""
    base = {"TF_CONFIG": "{}", "TF_CPP_MIN_LOG_LEVEL": "0", "CUDA_VISIBLE_DEVICES": ""}
    base["KERAS_DISTPLUG_DEVICES_PER_WORKER"] = "4"
    environ = worker_environment(common_environment(base), local_cluster([1001])[0], CONTRACT)
    assert "TF_CONFIG" not in environ
    assert (environ["TF_CPP_MIN_LOG_LEVEL"], environ["CUDA_VISIBLE_DEVICES"]) == ("0", "")
    assert Supervised.from_env(environ) == CONTRACT


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("0,1", ("0", "1")),
        ("GPU-a, GPU-b", ("GPU-a", "GPU-b")),
        ("", ()),
        ("-1", ()),
        ("2,-1,3", ("2",)),
    ],
)
def test_gpus_of_the_environment(value: str, gpus: tuple[str, ...], tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES names the GPUs, up to the first invalid entry."""
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, tmp_path) == gpus


def test_gpus_of_the_machine(tmp_path: Path) -> None:
    """Without it, the device files are counted, and numbered from 0 as CUDA does."""
    for name in ("nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")


def test_divide_gpus() -> None:
    """Every worker has its own GPUs: the requested number, or an equal share."""
    assert divide_gpus(["0", "1", "2", "3"], 2, 1) == [("0",), ("1",)]
    assert divide_gpus(["0", "1", "2", "3", "4"], 2, None) == [("0", "1"), ("2", "3")]
    assert divide_gpus([], 2, 3) is None


@pytest.mark.parametrize(("workers", "per_worker", "needed"), [(3, None, 3), (1, 3, 3), (2, 2, 4)])
def test_too_few_gpus(workers: int, per_worker: int | None, needed: int) -> None:
    """If there are too few GPUs, the error says how many are needed and how to train without."""
    with pytest.raises(
        ConfigurationError, match=rf"least {needed} GPUs .*Received: 2.*_DEVICES=''"
    ):
        divide_gpus(["0", "1"], workers, per_worker)


def test_foreign_cluster() -> None:
    """In a process that belongs to a scheduler's cluster, no other cluster is started."""
    role = local_cluster([1001, 1002])[1]
    with pytest.raises(ConfigurationError, match=r"worker-1, one of 2.*unset TF_CONFIG"):
        refuse_foreign_cluster({"TF_CONFIG": role.to_tf_config()})
    served = {"chief": ("a:1",), "worker": ("b:1",), "ps": ("c:1",)}
    with pytest.raises(ConfigurationError, match=r"chief-0, one of 3.*unset TF_CONFIG"):
        refuse_foreign_cluster({"TF_CONFIG": Role("chief", 0, served, "TF_CONFIG").to_tf_config()})
    with pytest.raises(ClusterError, match="not valid JSON"):
        refuse_foreign_cluster({"TF_CONFIG": "{"})
    refuse_foreign_cluster({"TF_CONFIG": "{}"})


@pytest.mark.parametrize(
    ("variable", "environ"),
    [
        (
            "SLURM_STEP_ID",
            {
                "SLURM_JOB_ID": "1000",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "node1",
                "SLURM_STEP_TASKS_PER_NODE": "2",
            },
        ),
        (
            "CLUSTER_SPEC",
            {
                "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}, '
                '"task": {"type": "workerpool0", "index": 0}}'
            },
        ),
        ("SM_HOSTS", {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}),
    ],
)
def test_foreign_cluster_of_other_sources(variable: str, environ: dict[str, str]) -> None:
    """The error names the variable to unset, which fixes it."""
    with pytest.raises(ConfigurationError, match=f"0, one of 2 tasks, .*unset {variable} to start"):
        refuse_foreign_cluster(environ)
    del environ[variable]
    refuse_foreign_cluster(environ)


def test_command_hints(tmp_path: Path) -> None:
    """A command that cannot be started is refused with a hint."""
    script = tmp_path / "train.py"
    script.touch()
    plain = tmp_path / "train"
    plain.touch()
    for name, hint in [
        (str(script), f"-- python {script}"),
        (str(plain), "not executable"),
        ("no-such-program", "Expected a program on PATH"),
    ]:
        with pytest.raises(CommandNotFoundError, match=hint):
            check_command([name], os.environ)
    check_command(["sh"], os.environ)


def test_script_without_interpreter(tmp_path: Path) -> None:
    """An executable that the system cannot run causes a readable error."""
    script = tmp_path / "train"
    script.write_text("print(1)\n")
    script.chmod(0o755)
    check_command([str(script)], os.environ)
    with pytest.raises(CommandNotFoundError, match="Exec format error"):
        spawn([str(script)], os.environ)
