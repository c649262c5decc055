from __future__ import annotations

import pytest

from keras_distplug.cluster.roles import Role, single_process
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.strategies.select import choose

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
    """A cluster comes first, then several GPUs; the reason is said."""
    choice = choose("auto", cluster, gpus)
    assert (choice.name, choice.reason) == (name, reason)


def test_parameter_servers() -> None:
    """Tasks of the kind `ps` choose the parameter server strategy, which is refused by name."""
    with pytest.raises(ConfigurationError, match=r"'parameter_server' \(TF_CONFIG has 'ps'"):
        choose("auto", WITH_PS, 0)


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_one_process_of_a_cluster(name: str) -> None:
    """A cluster whose workers would each train a model of their own is refused."""
    with pytest.raises(ConfigurationError, match="each of which would train a model of its own"):
        choose(name, TWO, 2)
