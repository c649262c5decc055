from __future__ import annotations

from math import inf, nan

import pytest

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.timeouts import COLLECTIVE, HEARTBEAT, Timeouts


@pytest.mark.parametrize(
    "timeouts", [Timeouts(), Timeouts(1.0), Timeouts(None, 90.5), Timeouts(3.0, 60.0)]
)
def test_environment_round_trip(timeouts: Timeouts) -> None:
    """The environment returns the timeouts put into it, and nothing else."""
    assert Timeouts.from_env(timeouts.to_env()) == timeouts
    assert len(timeouts.to_env()) == 2 - [timeouts.heartbeat_secs, timeouts.collective_secs].count(
        None
    )


def test_empty_variables() -> None:
    """An empty variable counts as unset."""
    assert Timeouts.from_env({HEARTBEAT: "", COLLECTIVE: ""}) == Timeouts()


def test_precedence() -> None:
    """Every argument independently takes precedence."""
    assert Timeouts(3.0).or_else(Timeouts(5.0, 60.0)) == Timeouts(3.0, 60.0)
    assert Timeouts().or_else(Timeouts(5.0)) == Timeouts(5.0)


@pytest.mark.parametrize("secs", [0.0, -1.0, 0.9, inf, nan])
@pytest.mark.parametrize("name", ["heartbeat", "collective"])
def test_impossible(name: str, secs: float) -> None:
    """An impossible timeout is refused by name."""
    with pytest.raises(ConfigurationError, match=f"the {name} timeout to be .* at least 1 s"):
        Timeouts(**{f"{name}_secs": secs})


@pytest.mark.parametrize("name", [HEARTBEAT, COLLECTIVE])
def test_not_a_number(name: str) -> None:
    """A variable that does not hold a number is named in the error."""
    expected = f"Expected {name} to be a number of seconds. Received: '3 s'"
    with pytest.raises(ConfigurationError, match=expected):
        Timeouts.from_env({name: "3 s"})
