"""Compares what workers are about to train."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

from cluster.key_values import Memory  # noqa: E402

from keras_distplug.checkpoint import same_start  # noqa: E402
from keras_distplug.cluster.channel import Channel  # noqa: E402
from keras_distplug.cluster.roles import Role  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402

WORKERS = 3
CLUSTER = {"worker": tuple(f"host{n}:1" for n in range(WORKERS))}
SEED = "the seed of `keras.utils.set_random_seed`"


@pytest.fixture(autouse=True)
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in one process would share the message count; here every topic has one key."""
    monkeypatch.setattr(Channel, "_next_key", lambda self, topic: f"{next(self.number)}/{topic}")


def compare(
    facts: list[same_start.Facts], clocks: list[Callable[[], float]] | None = None
) -> list[str | None]:
    """Returns the error that every worker raises, if any."""
    store = Memory()

    def ask(index: int) -> str | None:
        own = Channel(Role("worker", index, CLUSTER, "a test"), store, timeout_s=10)
        own.number = itertools.count()  # type: ignore[attr-defined]
        clock = (lambda: 1000.0) if clocks is None else clocks[index]
        try:
            same_start.require_same(own, facts[index], clock)
        except ConfigurationError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(ask, range(WORKERS), timeout=30))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(same_start, "announce", said.append)
    return said


def test_refused(lines: list[str]) -> None:
    """All workers refuse with the same message: sizes before values, and only the first ones."""
    usual = {"epochs": "3", "loss": "mse", "data: samples": "64", "data: contents of x": "aa"}
    other = {"epochs": "4", "loss": "mae", "data: samples": "96", "data: contents of x": "bb"}
    [error, *others] = compare([usual, usual, other])
    assert others == [error, error]
    assert error is not None
    assert error.startswith(
        "The workers are about to train different things (epochs: 3 on worker-0, 4 on "
        "worker-2; loss: mse on worker-0, mae on worker-2; samples: 64 on worker-0, 96 on "
        "worker-2; and 1 more). "
    )
    assert lines == []


def test_own_part_of_the_data() -> None:
    """The error about data says how every worker can read its own part."""
    [error, *_] = compare([{"data: contents of x": each} for each in ("aa", "bb", "bb")])
    assert error is not None
    assert "x: hash aa on worker-0, hash bb on worker-1" in error
    assert "AutoShardPolicy.OFF" in error


@pytest.mark.parametrize(
    ("batches", "argument"),
    [
        ("batches per epoch", "steps_per_epoch"),
        ("batches of validation_data", "validation_steps"),
    ],
)
def test_uneven_parts(batches: str, argument: str) -> None:
    """The error about parts of different sizes says which argument makes epochs equally long."""
    [error, *_] = compare([{batches: each} for each in ("3", "5", "3")])
    assert error is not None
    assert f"{batches}: 3 on worker-0, 5 on worker-1" in error
    assert f"Or pass the smallest number as `{argument}`." in error


def test_missing() -> None:
    """A fact that only one worker has, or an argument that only one gives, is a difference."""
    [error, *_] = compare([{}, {"class_weight": "{0: 2.0}"}, {"validation_data": "given"}])
    assert error is not None
    assert "class_weight: none on worker-0, {0: 2.0} on worker-1" in error
    assert "validation_data: none on worker-0, given on worker-2" in error


def test_harmless_differences(lines: list[str]) -> None:
    """Harmless differences are listed in one line of the chief's log."""
    chief = {SEED: "1", "optimizer.learning_rate": "0.01", "Python": "3.11.7"}
    other = {SEED: "2", "optimizer.learning_rate": "0.05", "Python": "3.12.1"}
    assert compare([chief, chief, other]) == [None] * 3
    assert lines == [
        f"the workers differ ({SEED}: 1 on worker-0, 2 on worker-2, worker-0's is used; "
        "optimizer.learning_rate: 0.01 on worker-0, 0.05 on worker-2, worker-0's is used; "
        "Python: 3.11.7 on worker-0, 3.12.1 on worker-2)"
    ]


def test_schedule() -> None:
    """A schedule is not a variable that all workers get from the chief."""
    [error, *_] = compare([{"optimizer.learning_rate": each} for each in ("0.1", "Decay()", "0.1")])
    assert error is not None
    assert "optimizer.learning_rate: 0.1 on worker-0, Decay() on worker-1" in error


def test_clocks(lines: list[str]) -> None:
    """A clock that is behind or ahead is reported; a worker that is late is not."""
    at = [1000.0, 900.0, 1300.0]
    assert compare([{}] * 3, [lambda each=each: each for each in at]) == [None] * 3
    assert lines == [
        "the workers differ (the clock of worker-1 is 100 s behind worker-0's; the clock of "
        "worker-2 is 300 s ahead of worker-0's)"
    ]
    lines.clear()
    late = itertools.count(1000.0, 60.0)  # shared by all workers, a minute later every time
    assert compare([{}] * 3, [lambda: next(late)] * 3) == [None] * 3
    assert lines == []
