"""How long a worker waits for its own data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

from keras_distplug.compat import steps  # noqa: E402


class Own:
    """A worker's own iterator, as TensorFlow has it."""

    def get_next_as_list(self) -> str:
        return "list"

    def get_next_as_optional_list(self) -> str:
        return "batch"


class Distributed:
    def __init__(self) -> None:
        self._iterators = [Own()]

    def get_next_as_optional(self) -> SimpleNamespace:
        found = self._iterators[0].get_next_as_optional_list()
        return SimpleNamespace(has_value=lambda: True, get_value=lambda: found)


@pytest.fixture
def no_search() -> Iterator[None]:
    """Python does not look for what refers to itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_listeners() -> None:
    """Each one hears of each fetch, until it wants no more."""
    model, iterator = SimpleNamespace(), Distributed()
    one: list[float] = []
    other: list[float] = []
    steps.hear_of_fetches(model, one.append)
    steps.hear_of_fetches(model, other.append)
    for _ in range(2):
        assert steps._fetched(model, str.upper, iterator) == "BATCH"
    steps.hear_no_more_of_fetches(model, one.append)
    steps._fetched(model, str.upper, iterator)
    assert (len(one), len(other)) == (2, 3)


def test_iterator_is_let_go(no_search: None) -> None:
    """At once: one that lives on until Python looks for such ends wherever that happens to be, and
    its end may take TensorFlow a minute."""
    model, iterator = SimpleNamespace(), Distributed()
    steps.hear_of_fetches(model, [].append)
    steps._fetched(model, str.upper, iterator)
    own = weakref.ref(iterator._iterators[0])
    del iterator
    assert own() is None
