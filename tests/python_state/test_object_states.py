"""Tests which attributes of an object are kept, and how they are restored."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

from keras_distplug.python_state.object_states import Attributes  # noqa: E402


class Thing:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def through_json(values: Any) -> Any:
    return json.loads(json.dumps(values))


@pytest.mark.parametrize(
    "value",
    [
        3,
        2.5,
        "text",
        True,
        [3, 1, 2],
        [("a.png", 1), ("b.png", 0)],
        {"a": 1, "b": [1, "c"]},
        np.arange(100)[::-1].copy(),
        np.ones((3, 40), "float16"),
        np.array([True, False]),
    ],
    ids=repr,
)
def test_values(value: Any) -> None:
    """Values are restored with their types."""
    thing = Thing(value=None)
    attributes = Attributes(thing)
    thing.value = value
    stored = through_json(attributes.read())
    other = Thing(value=None)
    Attributes(other).assign(stored)
    np.testing.assert_equal(other.value, value)
    assert type(other.value) is type(value)
    assert getattr(other.value, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: np.random.default_rng(3), lambda rng: rng.normal()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda rng: rng.normal()),
        (lambda: np.random.RandomState(3), lambda rng: rng.normal()),
        (lambda: random.Random(3), lambda rng: rng.gauss(0, 1)),
    ],
)
def test_generators(make: Any, draw: Any) -> None:
    """A generator continues where the other was, and remains the same object."""
    one, other = Thing(rng=make()), Thing(rng=make())
    draw(one.rng)
    stored = through_json(Attributes(one, only_generators=True).read())
    kept = other.rng
    Attributes(other).assign(stored)
    assert other.rng is kept
    assert [draw(other.rng) for _ in range(3)] == [draw(one.rng) for _ in range(3)]


def test_in_place() -> None:
    """Arrays, lists and dicts are changed in place if other objects refer to them."""
    array, items, names = np.arange(5), [1, 2], {"a": 1}
    thing = Thing(array=array, items=items, names=names)
    stored = through_json(Attributes(thing).read())
    array[:], items[:], names["a"] = 0, [], 2
    Attributes(thing).assign(stored)
    assert thing.array is array
    assert array.tolist() == [0, 1, 2, 3, 4]
    assert thing.items is items
    assert items == [1, 2]
    assert thing.names is names
    assert names == {"a": 1}


@pytest.mark.parametrize("kind", ["array", "list"])
def test_large_values(kind: str) -> None:
    """Values of more than 1 MB are only kept if they change, and values of more than 16 MB are
    never kept."""
    for size, is_kept in ((3 * 2**16, True), (3 * 2**20, False)):
        values: Any = np.arange(size, dtype="float64")
        if kind == "list":
            values = [f"{number:08d}" for number in range(size)]
        thing = Thing(values=values)
        attributes = Attributes(thing)
        assert attributes.read() == {}
        assert attributes.too_large() == []
        thing.values[:2] = thing.values[1], thing.values[0]
        assert ("values" in attributes.read()) is is_kept
        assert attributes.too_large() == ([] if is_kept else ["values"])


def test_skipped_attributes() -> None:
    """Other attributes, such as images, cost nothing and are not inspected."""
    images = {number: np.ones((100, 100)) for number in range(100)}
    thing = Thing(images=images, lists=[[np.ones(3)]], names=np.array(["a"]), other=object(), own=1)
    assert Attributes(thing, others=["own"]).read() == {}


def test_text_of_another_process() -> None:
    """Paths that a process has listed itself stay; only their order is restored."""
    stored = through_json(
        Attributes(Thing(root="/a", files=["/a/2", "/a/1"], names=["y", "x"])).read()
    )
    there = Thing(root="/b", files=["/b/1", "/b/2"], names=["x", "y"])
    Attributes(there).assign(stored)
    assert vars(there) == {"root": "/b", "files": ["/b/1", "/b/2"], "names": ["y", "x"]}


def test_torch_objects() -> None:
    """Tensors are restored in place, and generators with their state."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    owner = Thing(rng=torch.Generator().manual_seed(3), order=torch.arange(200))
    attributes = Attributes(owner)
    torch.randn(3, generator=owner.rng)
    shared = owner.order
    shared.copy_(torch.randperm(200))
    expected = shared.clone()
    stored = through_json(attributes.read())
    drawn = torch.randn(3, generator=owner.rng)
    shared.zero_()
    attributes.assign(stored)
    assert torch.equal(torch.randn(3, generator=owner.rng), drawn)
    assert owner.order is shared
    assert torch.equal(shared, expected)
