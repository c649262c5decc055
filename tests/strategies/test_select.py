from __future__ import annotations

import pytest

from keras_distplug.cluster.roles import Role, single_process
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.strategies.select import NAMES, choose

TWO = Role("worker", 0, {"worker": ("a:1", "b:1")}, "TF_CONFIG")
SLURM = Role("worker", 0, {"worker": ("a:1", "b:1")}, "Slurm")
WITH_PS = Role("chief", 0, {"chief": ("a:1",), "worker": ("b:1",), "ps": ("c:1",)}, "TF_CONFIG")
ALONE = single_process()


@pytest.mark.parametrize(
    ("cluster", "gpus", "name", "reason"),
    [
        (ALONE, 0, "one_device", "no GPU on this machine"),
        (ALONE, 1, "one_device", "1 GPU on this machine"),
        (ALONE, 2, "mirrored", "2 GPUs on this machine"),
        (TWO, 0, "multi_worker", "TF_CONFIG has 2 workers"),
        (TWO, 2, "multi_worker", "TF_CONFIG has 2 workers"),
        (SLURM, 0, "multi_worker", "Slurm has 2 workers"),
    ],
)
def test_auto(cluster: Role, gpus: int, name: str, reason: str) -> None:
    """A cluster takes precedence over several GPUs; the reason is recorded."""
    choice = choose("auto", cluster, gpus)
    assert (choice.name, choice.reason) == (name, reason)


def test_parameter_servers() -> None:
    """If there are `ps` tasks, the parameter server strategy is chosen."""
    choice = choose("auto", WITH_PS, 2)
    assert (choice.name, choice.reason) == ("parameter_server", "TF_CONFIG has 'ps' tasks")
    assert choose("parameter_server", WITH_PS, 0).name == "parameter_server"


@pytest.mark.parametrize("missing", ["chief", "worker", "ps"])
def test_missing_task_type(missing: str) -> None:
    """Every task type is required, and the message names the missing one."""
    cluster = {task: tasks for task, tasks in WITH_PS.cluster.items() if task != missing}
    role = Role(next(iter(cluster)), 0, cluster, "TF_CONFIG")
    with pytest.raises(ConfigurationError, match=f"Missing: {missing}"):
        choose("parameter_server", role, 0)


def test_single_process_has_no_parameter_servers() -> None:
    """A single process has no parameter servers."""
    with pytest.raises(ConfigurationError, match=r"a single process. Missing: chief, worker, ps"):
        choose("parameter_server", ALONE, 0)


@pytest.mark.parametrize("inside", [True, False])
def test_evaluator(inside: bool) -> None:
    """An evaluator, inside or outside the cluster, does not train; the others train without it."""
    cluster = {"chief": ("a:1",), "worker": ("b:1",)} | ({"evaluator": ("c:1",)} if inside else {})
    for name in NAMES:
        with pytest.raises(ConfigurationError, match="an 'evaluator' task"):
            choose(name, Role("evaluator", 0, cluster, "TF_CONFIG"), 0)
    chief = Role("chief", 0, cluster, "TF_CONFIG")
    assert (choose("auto", chief, 0).name, chief.world_size) == ("multi_worker", 2)
    assert "evaluator" not in chief.to_tf_config()


def test_parameter_servers_and_an_evaluator() -> None:
    """An evaluator is refused."""
    role = Role("evaluator", 0, {**WITH_PS.cluster, "evaluator": ("d:1",)}, "TF_CONFIG")
    with pytest.raises(ConfigurationError, match="'evaluator'"):
        choose("auto", role, 0)


@pytest.mark.parametrize("name", ["one_device", "mirrored", "multi_worker", "central_storage"])
def test_wrong_strategy_for_parameter_servers(name: str) -> None:
    """A cluster with parameter servers requires that strategy."""
    with pytest.raises(ConfigurationError, match="a cluster with parameter servers"):
        choose(name, WITH_PS, 0)


def test_roles_with_parameter_servers() -> None:
    """The chief alone has callbacks and saves; workers and parameter servers serve."""
    assert (WITH_PS.world_size, WITH_PS.workers, WITH_PS.rank) == (1, ("chief-0",), 0)
    assert WITH_PS.is_chief
    for task in ("worker", "ps"):
        other = Role(task, 0, WITH_PS.cluster, "TF_CONFIG")
        assert (other.is_server, other.is_chief) == (True, False)
    assert not WITH_PS.is_server
    assert not TWO.is_server


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_one_process_of_a_cluster(name: str) -> None:
    """A cluster whose workers would train separate models is refused."""
    with pytest.raises(ConfigurationError, match="Each would train a separate model"):
        choose(name, TWO, 2)
