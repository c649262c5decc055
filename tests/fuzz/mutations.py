"""JSON from an untrusted source."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**18, 10**400]),
    st.floats(),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["../../etc/passwd", "/etc/passwd", "float32", "NaN", "a" * 1000, "\x00"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, each in inner:
        yield from places_in(each, (*place, key))


@st.composite
def mutated(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """Returns `value` with up to `most` of its parts replaced, removed or duplicated."""
    holder = {"it": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, most))):
        place = draw(st.sampled_from(list(places_in(holder))[1:]))
        parent: Any = holder
        for key in place[:-1]:
            parent = parent[key]
        what = draw(st.sampled_from(["replace", "leave out", "twice"]))
        if what == "leave out" and len(place) > 1:
            del parent[place[-1]]
        elif what == "twice" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[place[-1]]))
        else:
            parent[place[-1]] = draw(VALUES)
    return holder["it"]
