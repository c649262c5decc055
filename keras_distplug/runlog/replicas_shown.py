"""The replicas of a run as the page shows them: times per replica, and stragglers."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_distplug.core import events
from keras_distplug.core.events import ReplicaTimes, Window
from keras_distplug.runlog.goodput_totals import Fit

BINS = 240  # of time
_NOTHING = -1.0
_MOST_ROWS = 96  # of replicas; if there are more, these are shown:
_SLOWEST = 64
_SHARES = (  # and quantiles of all replicas
    (1.0, "the slowest of {}"),
    (0.9, "9 of 10 take less"),
    (0.5, "the median of {}"),
    (0.0, "the fastest of {}"),
)
_RECENT = 20  # windows


def heat(fits: Sequence[Fit], begin: float, end: float) -> dict[str, Any]:
    """Returns the times of every replica in every stretch of time: the largest of its windows."""
    width = (end - begin) / BINS or 1.0
    found: dict[str, defaultdict[int, list[float]]] = {
        what: defaultdict(lambda: [_NOTHING] * BINS) for what in ("compute", "sync", "input")
    }
    where: dict[int, str] = {}
    for fit in fits:
        worker = f"{fit.source} on {fit.began.host}"
        for entry in fit.entries:
            window = entry.event
            if not isinstance(window, Window) or not window.replicas:
                continue
            last = min(int((entry.at - begin) / width), BINS - 1)
            first = max(int((entry.at - sum(window.secs.values()) - begin) / width), 0)
            for each in window.replicas:
                where[each.replica] = worker
                for what, value in _secs(window, each).items():
                    if value is None:
                        continue
                    cells = found[what][each.replica]
                    for number in range(first, last + 1):
                        if cells[number] < value:
                            cells[number] = value
    rows: Sequence[int] = sorted(where)
    shares: tuple[tuple[float, str], ...] = ()
    if len(rows) > _MOST_ROWS:
        rows = sorted(rows, key=lambda row: _own(found, row), reverse=True)[:_SLOWEST]
        shares = _SHARES
    nothing = [_NOTHING] * BINS
    return {
        "width": width,
        "replicas": len(where),
        "rows": [
            *({"replica": None, "where": label.format(len(where))} for _, label in shares),
            *({"replica": row, "where": where[row]} for row in rows),
        ],
        "milliseconds": {
            what: [
                [None if cell == _NOTHING else _milliseconds(cell) for cell in cells]
                for cells in (
                    *_of_all(list(of.values()), [share for share, _ in shares]),
                    *(of.get(row, nothing) for row in rows),
                )
            ]
            for what, of in found.items()
            if of
        },
    }


def _own(found: Mapping[str, Mapping[int, Sequence[float]]], replica: int) -> float:
    """Returns the time of a replica that others wait for: the mean where it is known."""
    means = []
    for what in ("compute", "input"):
        known = [cell for cell in found[what].get(replica, ()) if cell != _NOTHING]
        means.append(sum(known) / len(known) if known else 0.0)
    return sum(means)


def _of_all(rows: Sequence[Sequence[float]], shares: Sequence[float]) -> Iterator[list[float]]:
    """Returns the quantiles of all rows, per column."""
    if not shares:
        return
    columns = [
        sorted(cell for cell in column if cell != _NOTHING) for column in zip(*rows, strict=True)
    ]
    for share in shares:
        yield [
            column[round(share * (len(column) - 1))] if column else _NOTHING for column in columns
        ]


def _milliseconds(secs: float) -> float:
    """Rounds to three digits, enough for a color, to keep the page small."""
    return round(1000 * secs) if secs >= 0.1 else float(f"{1000 * secs:.3g}")


def ranking(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Returns the replicas of the last attempt, slowest first, by the time that others wait for
    them in the last windows."""
    if not fits:
        return []
    session = max(fits, key=lambda fit: fit.begins_at).began.session
    group = [fit for fit in fits if fit.began.session == session]
    recent: dict[int, list[tuple[int, dict[str, float | None]]]] = {}
    where: dict[int, tuple[int, str]] = {}
    for fit in group:
        windows = [
            entry.event
            for entry in fit.entries
            if isinstance(entry.event, Window) and entry.event.replicas
        ]
        for window in windows[-_RECENT:]:
            for each in window.replicas:
                where[each.replica] = fit.began.rank, f"{fit.source} on {fit.began.host}"
                taken = window.steps, _secs(window, each)
                recent.setdefault(each.replica, []).append(taken)
    means = {replica: _means(taken) for replica, taken in recent.items()}
    own = {
        replica: sum(mean[what] or 0.0 for what in ("compute", "input"))
        for replica, mean in means.items()
    }
    told = _told_slow(group)
    found: list[dict[str, Any]] = []
    for replica, mean in means.items():
        others = [s for other, s in own.items() if other != replica]
        rank, name = where[replica]
        causes = told.get(("replica", replica), set()) | told.get(("worker", rank), set())
        found.append(
            {
                "replica": replica,
                "where": name,
                **{
                    f"{what}_ms": None if secs is None else round(1000 * secs, 3)
                    for what, secs in mean.items()
                },
                "score": round(statistics.median(others) / own[replica], 3)
                if others and own[replica]
                else 1.0,
                "told": sorted(causes),
            }
        )
    return sorted(found, key=lambda each: own[each["replica"]], reverse=True)[:_MOST_ROWS]


def _secs(window: Window, replica: ReplicaTimes) -> dict[str, float | None]:
    """Returns the times of a replica per step of a window."""
    return {"compute": replica.compute_s, "input": window.input_s, "sync": replica.sync_s}


def _means(taken: Sequence[tuple[int, Mapping[str, float | None]]]) -> dict[str, float | None]:
    """Returns the means over all steps in which a value is known."""
    found: dict[str, float | None] = {"compute": 0.0, "input": None, "sync": None}
    for what in found:
        known = [(steps, value) for steps, secs in taken if (value := secs[what]) is not None]
        if whole := sum(steps for steps, _ in known):
            found[what] = sum(steps * value for steps, value in known) / whole
    return found


def _told_slow(fits: Sequence[Fit]) -> dict[tuple[str, int], set[str]]:
    """Returns the causes for which replicas and workers are still reported as stragglers."""
    found: dict[tuple[str, int], set[str]] = {}
    told = [
        (entry.at, entry.event)
        for fit in fits
        for entry in fit.entries
        if isinstance(entry.event, events.SlowReplica)
    ]
    for _, event in sorted(told, key=lambda each: each[0]):
        key = ("worker", event.rank) if event.replica is None else ("replica", event.replica)
        causes = found.setdefault(key, set())
        (causes.discard if event.is_over else causes.add)(event.cause)
    return found
