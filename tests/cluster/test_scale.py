"""Messages between many workers, and requests to the store, counted in a simulation.

The numbers are exact, so growth with the square of the number of workers fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import at_scale
from support.at_scale import Cost

pytestmark = pytest.mark.timeout(120)

COUNTS = (8, 64)


@contextmanager
def cost_of(operation: str, count: int) -> Iterator[Cost]:
    with at_scale.cluster(count) as made:
        yield getattr(at_scale, operation)(made)


@pytest.mark.parametrize("count", COUNTS)
def test_agreements(count: int) -> None:
    """Every worker sends one message to the chief, and gets one from it."""
    others = count - 1
    with cost_of("one_to_all", count) as cost:
        assert cost.messages == {"put": 1, "get": others}
    for name in ("first_error", "all_to_all"):
        with cost_of(name, count) as cost:
            assert cost.messages == {"put": others + 1, "get": 2 * others, "delete": 1}
            assert cost.kept == 1  # until the next agreement
    with cost_of("barrier", count) as cost:
        assert cost.messages == {"barrier": count}


@pytest.mark.parametrize("count", COUNTS)
def test_stop(count: int) -> None:
    """Preemption: one worker notifies all others, and every worker reports its progress once."""
    with cost_of("stop", count) as cost:
        claims, letters, moments, word = count, count, count, 1
        assert cost.messages["put"] == claims + letters + moments + word
        whose_claim, next_letter = count - 1, count
        assert cost.messages["get"] == whose_claim + next_letter + moments + count


@pytest.mark.parametrize("count", COUNTS)
def test_statistics(count: int) -> None:
    """Every worker sends one report to the chief, and no other worker reads it."""
    with cost_of("statistics", count) as cost:
        assert cost.messages == {"put": count - 1, "get": count - 1, "delete": 1}
        assert cost.kept == 0


@pytest.mark.parametrize("count", COUNTS)
def test_checkpoints(count: int) -> None:
    """A save requests only its files and a few listings from the store. The number of files that a
    restore reads depends on their size, not on the number of workers."""
    with at_scale.cluster(count) as made:
        save, restore = at_scale.saved(made), at_scale.restored(made)
    others = count - 1
    agreed = {"put": 1 + (others + 1) + others, "get": others + 2 * others + others, "delete": 2}
    commit = {"put": 2 + others, "get": others + 2 * others, "delete": 1}
    assert save.messages["get"] == agreed["get"] + commit["get"]
    assert save.messages["put"] == agreed["put"] + commit["put"]
    assert save.messages["delete"] == agreed["delete"] + commit["delete"] + 2  # already received
    files = 8 * (2**30 // 8 // 2**25) if count == 8 else 64
    assert save.requests["PUT"] == files + 1
    assert save.requests.get("HEAD", 0) == 0
    assert save.requests["LIST"] < 20
    assert restore.requests["GET"] <= count * (4 * files + 2)
    assert restore.requests.get("HEAD", 0) == 0
    assert restore.requests["LIST"] < count + 20


def test_number_of_writers() -> None:
    """With thousands of workers, only some of them write, so that files stay large."""
    for workers, size, writers in ((8, 10, 8), (64, 10, 64), (4096, 10, 64), (4096, 2**30, 256)):
        assert at_scale.commit._writers(size, workers) == writers
        places = [at_scale.commit._writer_index(rank, writers, workers) for rank in range(workers)]
        assert [place for place in places if place is not None] == list(range(writers))
        assert places[0] == 0


def test_workers_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that a few of many workers wrote is complete."""
    monkeypatch.setattr(at_scale, "STATE_BYTES", 2**22)
    monkeypatch.setattr(at_scale.commit, "_ALL_WRITE", 3)
    with at_scale.cluster(7) as made:
        assert at_scale.saved(made).requests["PUT"] == 3 + 1
        at_scale.restored(made)  # which compares sizes
