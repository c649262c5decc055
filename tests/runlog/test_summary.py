"""The data that a page shows of a run: correct numbers, in a size that does not grow with the
run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import logged

from keras_distplug.core import events
from keras_distplug.core.events import SUPERVISOR, Entry, ReplicaTimes
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.summary import headline, summary
from keras_distplug.storage.survey import CheckpointState

WINDOWS = 100
LOOKED = {1950: CheckpointState("damaged", False), 1450: CheckpointState("committed", True)}
LOOKED[1000] = CheckpointState("committed", False)


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    fits, supervised, end = logged.fits(4, WINDOWS)
    return summary("run-0001", fits, supervised, end + 60, LOOKED)


def test_headline(shown: dict[str, Any]) -> None:
    """The headline has goodput, the state, and the newest checkpoint that counts."""
    wall_s = 2 * (10 + WINDOWS) + 5 + 2
    assert shown["end"] - shown["begin"] == pytest.approx(wall_s)
    assert sum(shown["secs"].values()) == pytest.approx(wall_s)
    productive_s = 0.8 * (2 * WINDOWS - 5)
    assert shown["goodput"] == pytest.approx(productive_s / wall_s)
    assert shown["secs"]["redone"] == pytest.approx(0.9 * 5)
    assert shown["secs"]["recovery"] == pytest.approx(5)
    assert shown["state"] == "finished"
    assert shown["last_checkpoint"]["step"] == 1450
    assert shown["newer_checkpoint"] is None
    assert [(each["state"], each["verified"]) for each in shown["checkpoints"]] == [
        ("replaced", None),
        ("committed", None),
        ("committed", "sizes"),
        ("damaged", None),
    ]


def test_headline_alone(shown: dict[str, Any]) -> None:
    """The headline can be computed alone: it is the same as in the summary, and small."""
    fits, supervised, end = logged.fits(4, WINDOWS)
    alone = headline("run-0001", fits, supervised, end + 9999, LOOKED)
    assert alone == {key: shown[key] for key in alone}
    assert len(json.dumps(alone)) < 3000


def saved(step: int, *, is_local: bool = False) -> events.Saved:
    return events.Saved(step, 0.4, is_local, 0.01, 1)


def restored(step: int, *, is_local: bool = False) -> events.Restored:
    return events.Restored(step, 0, 0, "there", is_local, 0.2)


def fit_of(*told: events.Event, session: str = "s", begin: float = 1000.0) -> Fit:
    """Returns the `fit` of a worker that logs an event every second."""
    began = events.Began(session, 0, 1, 1, "node", 1, "Strategy", 9, 0)
    entries = [Entry(begin + at, "worker-0", each) for at, each in enumerate((began, *told))]
    return Fit(began, tuple(entries))


@pytest.mark.parametrize("is_local", [False, True])
def test_verified_by_reading(is_local: bool) -> None:
    """Restoring a checkpoint verifies it; later checkpoints are not verified by that."""
    first = fit_of(saved(10, is_local=is_local))
    told = [restored(10, is_local=is_local), saved(20, is_local=is_local)]
    second = fit_of(*told, session="t", begin=2000.0)
    shown = summary("a", [first, second], [], 3000.0)
    assert [each["verified"] for each in shown["checkpoints"]] == ["read back", None]
    assert (shown["last_checkpoint"]["step"], shown["last_checkpoint"]["verified"]) == (
        10,
        "read back",
    )
    assert shown["newer_checkpoint"]["step"] == 20
    other_tier = fit_of(restored(10, is_local=not is_local), session="t", begin=2000.0)
    assert summary("a", [first, other_tier], [], 3000.0)["last_checkpoint"] is None


def test_damaged_after_it_was_read_back() -> None:
    """A checkpoint that was read back, and was damaged since, does not count."""
    fits = [fit_of(saved(10)), fit_of(restored(10), session="t", begin=2000.0)]
    shown = summary("a", fits, [], 3000.0, {10: CheckpointState("damaged", False)})
    assert shown["last_checkpoint"] is None


def test_attempts(shown: dict[str, Any]) -> None:
    first, second = shown["attempts"]
    assert (first["cause"], first["exit_code"], first["lost_steps"]) == (
        "worker-1 was killed",
        137,
        50,
    )
    assert (second["first_step"], second["last_step"]) == (950, 1950)


def test_area_chart(shown: dict[str, Any]) -> None:
    """The shares of every interval sum to one, and those of every category to its seconds."""
    shares, width = shown["area"]["shares"], shown["area"]["width"]
    for stretch in zip(*shares.values(), strict=True):
        assert sum(stretch) == pytest.approx(1, abs=1e-3)
    for category, values in shares.items():
        assert sum(values) * width == pytest.approx(shown["secs"][category], abs=0.05)


def test_heatmap(shown: dict[str, Any]) -> None:
    """There is a row for every replica, and no value while no worker trained."""
    heat = shown["heat"]
    assert [each["replica"] for each in heat["rows"]] == [0, 1, 2, 3]
    assert heat["rows"][2]["where"] == "worker-2 on node-2"
    for row, cells in enumerate(heat["milliseconds"]["compute"]):
        assert {cell for cell in cells if cell is not None} == {140 if row == logged.SLOW else 70}
        assert cells[0] == cells[-3] == (140 if row == logged.SLOW else 70)
        between = int((10 + WINDOWS + 2) / heat["width"])
        assert cells[between] is None


def test_ranking(shown: dict[str, Any]) -> None:
    """The slowest replica is first, with the findings about it."""
    first, *others = shown["ranking"]
    # The others wait for compute (140 instead of 70 ms) and input (10 ms on all replicas).
    assert (first["replica"], first["score"], first["told"]) == (logged.SLOW, 0.533, ["compute"])
    assert (first["compute_ms"], first["input_ms"], first["sync_ms"]) == (140, 10, 10)
    assert [each["score"] for each in others] == [1.0] * 3
    assert all(not each["told"] for each in others)


def test_incidents(shown: dict[str, Any]) -> None:
    """The newest group is first."""
    straggler, skipped, failed = shown["incidents"]
    assert [straggler["kind"], skipped["kind"], failed["kind"]] == [
        "slow_replica",
        "update_left_out",
        "failed",
    ]
    assert (straggler["what"], straggler["replicas"]) == ("slow", (logged.SLOW,))
    assert (skipped["title"], skipped["count"]) == ("NaN in `dense/kernel`", 1)
    assert (skipped["replicas"], skipped["where"]) == ((1,), ("worker-1 on node-1",))
    assert (skipped["epoch"], skipped["batch"]) == (0, 17)
    assert (failed["what"], failed["where"]) == ("worker-1 was killed", ("worker-1 on node-1",))


def slow(
    replica: int | None, cause: str = "compute", *, is_over: bool = False
) -> events.SlowReplica:
    return events.SlowReplica(cause, 0, "worker-0", 0.2, replica, 0.1, is_over, f"{cause} slow")


def window(
    step: int, steps: int, *own: tuple[float, float | None], input_s: float | None = None
) -> events.Window:
    replicas = tuple(ReplicaTimes(number, *each) for number, each in enumerate(own))
    return events.Window(step, steps, 0, {"step": 1.0}, 0.1, input_s, None, replicas)


def findings_of(shown: dict[str, Any]) -> dict[int, list[str]]:
    return {each["replica"]: each["told"] for each in shown["ranking"]}


def test_only_the_slow_replica_is_marked() -> None:
    """A finding about a replica is not shown for the others of its worker; one about a worker is
    shown for all of its replicas."""
    windows = [window(10 * n, 10, (0.2, 0.0), (0.1, 0.1)) for n in range(1, 4)]
    assert findings_of(summary("a", [fit_of(*windows, slow(0))], [], 2000.0)) == {
        0: ["compute"],
        1: [],
    }
    both = summary("a", [fit_of(*windows, slow(0), slow(None, "input"))], [], 2000.0)
    assert findings_of(both) == {0: ["compute", "input"], 1: ["input"]}


def test_recovered_straggler() -> None:
    windows = [window(10 * n, 10, (0.2, 0.0), (0.1, 0.1)) for n in range(1, 4)]
    over = fit_of(*windows, slow(0), slow(None, "input"), slow(0, is_over=True))
    assert findings_of(summary("a", [over], [], 2000.0)) == {0: ["input"], 1: ["input"]}


def test_ranking_is_recent() -> None:
    """A replica that was slow long ago, but not since, is not ranked first."""
    before = [window(10 * n, 10, (0.9, 0.0), (0.1, 0.8)) for n in range(1, 101)]
    since = [window(10 * n, 10, (0.1, 0.1), (0.2, 0.0)) for n in range(101, 131)]
    first, second = summary("a", [fit_of(*before, *since)], [], 2000.0)["ranking"]
    assert (first["replica"], first["compute_ms"], first["score"]) == (1, 200, 0.5)
    assert (second["replica"], second["compute_ms"], second["sync_ms"]) == (0, 100, 100)


def test_ranking_by_input() -> None:
    """A worker whose data is late delays the others as much as one that computes slowly."""
    fits = []
    for rank, input_s in enumerate((0.0, 0.3)):
        began = events.Began("s", rank, 2, 2, f"node-{rank}", 1, "Strategy", 9, 0)
        replicas = (ReplicaTimes(rank, 0.1 - 0.01 * rank, 0.0),)
        window = events.Window(10, 10, 0, {"step": 4.0}, 0.4, input_s, None, replicas)
        entries = tuple(
            Entry(1000.0 + at, f"worker-{rank}", e) for at, e in ((0, began), (4, window))
        )
        fits.append(Fit(began, entries))
    first, _ = summary("a", fits, [], 2000.0)["ranking"]
    assert (first["replica"], first["where"]) == (1, "worker-1 on node-1")
    assert (first["input_ms"], first["score"]) == (300, round(0.1 / 0.39, 3))


def test_repeated_incidents() -> None:
    """Incidents of different fits, jobs or rollbacks are counted separately."""
    told = events.SaveFailed(10, 1, False, "no space")
    fits = [fit_of(told, told), fit_of(told, session="t", begin=2000.0)]
    died = events.Failed("worker-0", "killed", 137, "worker-0 was killed")
    supervised = [Entry(3000.0, SUPERVISOR, died, job, 0) for job in ("j", "k", "k")]
    shown = summary("a", fits, supervised, 4000.0)
    groups = {each["kind"]: each["count"] for each in shown["incidents"]}
    assert groups == {"save_failed": 2, "failed": 2}
    back = [events.RolledBack(10, times, "NaN") for times in (1, 1, 2)]
    [rolled_back] = summary("a", [fit_of(*back)], [], 4000.0)["incidents"]
    assert rolled_back["count"] == 2


def test_only_started() -> None:
    """The summary of a run that has only started does not depend on the current time, and covers
    all of its entries."""
    fits = [fit_of()]
    shown = summary("a", fits, [], 2000.0)
    assert (shown["begin"], shown["end"]) == (1000.0, 1000.0)
    assert shown["area"]["shares"] == {}
    assert summary("a", fits, [], 2010.0) == shown
    assert summary("a", [fit_of(saved(0))], [], 2000.0)["end"] == 1001.0
    began = Entry(990.0, SUPERVISOR, events.Started(("worker-0",), (0,)), "j", 0)
    assert summary("a", fits, [began], 2000.0)["begin"] == 990.0


def many(workers: int, replicas: int, windows: int) -> list[Fit]:
    """Returns fits in which replica 7 is always slow, and replica 3 in one window."""
    found = []
    for rank in range(workers):
        own = [rank * replicas + number for number in range(replicas)]
        began = events.Began("s", rank, workers, workers * replicas, "node", 1, "Strategy", 9, 0)
        told = [Entry(1000.0, f"worker-{rank}", began)]
        for number in range(windows):
            taken = tuple(
                ReplicaTimes(
                    each,
                    3.0 if each == 3 and number == 50 else 0.2 if each == 7 else 0.1 + each / 1e5,
                    0.0123456 * (1 + each / 1000),
                )
                for each in own
            )
            event = events.Window(10 * number + 10, 10, 0, {"step": 10.0}, 1.0, 0.0234567, 1, taken)
            told.append(Entry(1010.0 + 10 * number, f"worker-{rank}", event))
        found.append(Fit(began, tuple(told)))
    return found


def test_many_replicas() -> None:
    """With more replicas than a page has rows, it shows the slowest ones, and the extremes of all
    replicas in every interval, so that no slow one is hidden."""
    shown = summary("a", many(64, 4, 240), [], 5000.0)
    heat = shown["heat"]
    assert heat["replicas"] == 256
    assert len(heat["rows"]) <= 96
    assert [row["where"] for row in heat["rows"][:4]] == [
        "the slowest of 256",
        "9 of 10 take less",
        "the median of 256",
        "the fastest of 256",
    ]
    slowest, most, median, fastest = heat["milliseconds"]["compute"][:4]
    assert max(slowest) == 3000
    assert sorted(slowest)[0] == 200
    assert (set(most), set(median), set(fastest)) == ({102}, {101}, {100})
    assert {7, 3} <= {row["replica"] for row in heat["rows"]}
    assert [each["replica"] for each in shown["ranking"][:3]] == [7, 255, 254]
    assert len(shown["ranking"]) <= 96
    assert len(json.dumps(shown)) < 500_000


def test_size() -> None:
    """The summary of 64 workers with 20,000 steps is smaller than half a megabyte."""
    fits, supervised, end = logged.fits(64, 1000)
    text = json.dumps(summary("run-0001", fits, supervised, end), allow_nan=False)
    assert len(text) < 500_000


def test_many_attempts() -> None:
    """The page has a limited size, however often a job was killed."""
    fits = [fit_of(saved(1), session=str(n), begin=1000.0 + 10 * n) for n in range(1000)]
    shown = summary("a", fits, [], 20_000.0)
    assert (shown["attempted"], len(shown["attempts"])) == (1000, 200)
    assert shown["attempts"][-1]["number"] == 1000


def test_reported_by_all_workers() -> None:
    """An incident that several workers log is one incident."""
    fits, _, end = logged.fits(2, 10)
    lost = events.Preempted("SIGTERM", "worker-0 on a", False, 20)
    fits = [
        type(fit)(fit.began, (*fit.entries, Entry(fit.ends_at, fit.source, lost, "j", 0)))
        for fit in fits[::2]
    ]
    [told] = summary("a", fits, [], end)["incidents"]
    assert told["what"] == "SIGTERM to worker-0 on a"


def test_nothing() -> None:
    shown = summary("a", [], [], 1.0)
    assert shown["state"] == "unknown"
    assert (shown["begin"], shown["end"], shown["step"]) == (0, 0, 0)
