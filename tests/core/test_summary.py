"""What a page shows of a run: right numbers, in a size that does not grow with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import logged

from keras_distplug.core import events
from keras_distplug.core.events import Entry
from keras_distplug.core.summary import summary

WINDOWS = 100


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    fits, supervised, end = logged.fits(4, WINDOWS)
    return summary("run-0001", fits, supervised, end + 60, {1000: "committed", 950: "damaged"})


def test_headline(shown: dict[str, Any]) -> None:
    """The share, the state, and the newest checkpoint that counts."""
    wall_s = 2 * (10 + WINDOWS) + 5 + 2
    assert shown["end"] - shown["begin"] == pytest.approx(wall_s)
    assert sum(shown["secs"].values()) == pytest.approx(wall_s)
    productive_s = 0.8 * (2 * WINDOWS - 5)
    assert shown["goodput"] == pytest.approx(productive_s / wall_s)
    assert shown["secs"]["redone"] == pytest.approx(0.9 * 5)
    assert shown["secs"]["recovery"] == pytest.approx(5)
    assert shown["state"] == "finished"
    assert shown["last_checkpoint"]["step"] == 1000
    assert [each["state"] for each in shown["checkpoints"]] == [
        "replaced",
        "committed",
        "replaced",
        "replaced",
    ]


def test_attempts(shown: dict[str, Any]) -> None:
    first, second = shown["attempts"]
    assert (first["cause"], first["exit_code"], first["lost_steps"]) == (
        "worker-1 was killed",
        137,
        50,
    )
    assert (second["first_step"], second["last_step"]) == (950, 1950)


def test_area(shown: dict[str, Any]) -> None:
    """Each stretch is whole, and all of them together are the seconds of each category."""
    shares, width = shown["area"]["shares"], shown["area"]["width"]
    for stretch in zip(*shares.values(), strict=True):
        assert sum(stretch) == pytest.approx(1, abs=1e-3)
    for category, values in shares.items():
        assert sum(values) * width == pytest.approx(shown["secs"][category], abs=0.05)


def test_heat(shown: dict[str, Any]) -> None:
    """A row for each replica, and nothing where nobody trained."""
    heat = shown["heat"]
    assert [each["replica"] for each in heat["rows"]] == [0, 1, 2, 3]
    assert heat["rows"][2]["where"] == "worker-2 on node-2"
    for row, cells in enumerate(heat["milliseconds"]["compute"]):
        assert {cell for cell in cells if cell is not None} == {140 if row == logged.SLOW else 70}
        assert cells[0] == cells[-3] == (140 if row == logged.SLOW else 70)
        between = int((10 + WINDOWS + 2) / heat["width"])
        assert cells[between] is None


def test_ranking(shown: dict[str, Any]) -> None:
    """The slowest first, with what was told of it."""
    first, *others = shown["ranking"]
    assert (first["replica"], first["score"], first["told"]) == (logged.SLOW, 0.5, ["compute"])
    assert [each["score"] for each in others] == [1.0] * 3
    assert all(not each["told"] for each in others)


def test_incidents(shown: dict[str, Any]) -> None:
    told = [(each["kind"], each["what"]) for each in shown["incidents"]]
    assert told == [
        ("failed", "worker-1 was killed"),
        ("update_left_out", "a NaN"),
        ("slow_replica", "slow"),
    ]
    left_out = shown["incidents"][1]
    assert (left_out["replicas"], left_out["variable"], left_out["batch"]) == (
        [1],
        "dense/kernel",
        17,
    )


def test_size() -> None:
    """64 workers of 20,000 steps fit into half a megabyte."""
    fits, supervised, end = logged.fits(64, 1000)
    text = json.dumps(summary("run-0001", fits, supervised, end), allow_nan=False)
    assert len(text) < 500_000


@pytest.mark.parametrize(("later_s", "state"), [(10, "training"), (1000, "not heard of any more")])
def test_under_way(later_s: float, state: str) -> None:
    """Whether somebody trains is told by when it was last heard of."""
    fits, _, _ = logged.fits(1, 10)
    assert summary("a", fits[:1], [], fits[0].ends_at + later_s)["state"] == state


@pytest.mark.parametrize(
    ("told", "later_s", "state"),
    [
        (events.Failed("worker-1", "FAILED", 1, "worker-1 exited with 1"), 1, "worker-1 exited"),
        (events.Again(600, (0,)), 500, "being started"),
        (events.Started(("worker-0",), (0,)), 100, "being started"),
        (events.Started(("worker-0",), (0,)), 10_000, "not heard of any more"),
        (events.Ended(1, "too many restarts"), 10_000, "too many restarts"),
        (events.Training(5.0, "a kill"), 1, "training"),
    ],
)
def test_supervisor_knows_more(told: events.Event, later_s: float, state: str) -> None:
    """What it told after the last beginning of a `fit` is how things are; what it told before is
    over."""
    fits, _, _ = logged.fits(1, 10)
    end = fits[0].ends_at
    after, before = (Entry(at, "supervisor", told, "j", 0) for at in (end + 1, fits[0].begins_at))
    assert summary("a", fits[:1], [after], end + 1 + later_s)["state"].startswith(state)
    assert summary("a", fits[:1], [before], end + 1)["state"] == "training"


def test_told_by_all() -> None:
    """What several workers tell of is one incident."""
    fits, _, end = logged.fits(2, 10)
    lost = events.Preempted("SIGTERM", "worker-0 on a", False, 20)
    fits = [
        type(fit)(fit.began, (*fit.entries, Entry(fit.ends_at, fit.source, lost, "j", 0)))
        for fit in fits[::2]
    ]
    [told] = summary("a", fits, [], end)["incidents"]
    assert told["what"] == "SIGTERM to worker-0 on a"


def test_nothing() -> None:
    assert summary("a", [], [], 1.0)["state"] == "nothing is known yet"
