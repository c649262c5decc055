"""Reports of steps, and the conclusions from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keras_distplug.replicas.divergence import Divergence, divergence
from keras_distplug.step.step_reports import (
    ReplicaReport,
    StepReport,
    as_text,
    from_text,
    merge_reports,
    replicas_with_same_data,
)

ONE = ReplicaReport(0, 0.1, 0.2, 4.0, 1.0, 3.0, ("a", "b"))
OTHER = ReplicaReport(1, 0.3, None, 4.0, None, 5.0, ("a", "c"))
REPORT = StepReport(0, "worker-0 on h", 10, 10, 0.5, (ONE, OTHER), 0.01, 1000)


def test_round_trip() -> None:
    """A report survives a round trip through text."""
    assert from_text(as_text(REPORT)) == REPORT
    nan = replace(REPORT, replicas=(replace(ONE, loss=float("nan")),))
    assert str(from_text(as_text(nan))) == str(nan)


def test_merged() -> None:
    """Every step has the same weight; unknown values of a window are ignored."""
    longer = replace(
        REPORT,
        step=40,
        steps=30,
        step_s=0.9,
        replicas=(replace(ONE, loss=5.0), replace(OTHER, sync_s=0.4)),
        input_s=None,
        memory_bytes=2000,
    )
    found = merge_reports([REPORT, longer])
    assert (found.step, found.steps, found.memory_bytes) == (40, 40, 2000)
    assert (found.step_s, found.input_s) == (pytest.approx(0.8), 0.01)
    one, other = found.replicas
    assert (one.loss, other.loss) == (4.0, None)
    assert (one.sync_s, other.sync_s) == (pytest.approx(0.2), 0.4)


def test_merged_totals() -> None:
    """Totals are sums of the known values."""
    known = replace(REPORT, input_total_s=0.5, sync_total_s=1.0)
    found = merge_reports([known, REPORT, known])
    assert (found.input_total_s, found.sync_total_s) == (1.0, 2.0)
    assert merge_reports([REPORT]).input_total_s is None


def test_same_data() -> None:
    """The data must be the same in every step of the window, not only in some."""
    assert replicas_with_same_data([REPORT]) == ()
    same = replace(REPORT, worker=1, replicas=(replace(OTHER, replica=2, fingerprints=("a", "b")),))
    assert replicas_with_same_data([REPORT, same]) == (0, 2)
    unknown = replace(
        REPORT, replicas=(replace(ONE, fingerprints=()), replace(OTHER, fingerprints=()))
    )
    assert replicas_with_same_data([unknown]) == ()


WHERE = {0: "worker-0 on h", 1: "worker-0 on h", 2: "worker-1 on i"}
SAME = {"model/a": "1", "model/b": "2", "model/c": "3"}


def test_no_divergence() -> None:
    assert divergence(7, {0: SAME, 1: dict(SAME), 2: dict(SAME)}, WHERE) is None


def test_divergence() -> None:
    """The first variable that differs is reported, and the replicas in the minority."""
    found = divergence(7, {0: SAME, 1: SAME, 2: SAME | {"model/b": "9", "model/c": "9"}}, WHERE)
    assert found == Divergence(7, "model/b", 2, (2,), ("worker-1 on i",))
    assert str(found) == (
        "at step 7, the values of `model/b` (and 1 more) on replica 2 (worker-1 on i) differ from "
        "those of other replicas: they now train different models. Resume from a checkpoint saved "
        "before this step"
    )


def test_divergence_of_two() -> None:
    """Without a majority, both replicas are reported."""
    found = divergence(7, {0: SAME, 2: SAME | {"model/c": "9"}}, WHERE)
    assert found == Divergence(7, "model/c", 1, (0, 2), ("worker-0 on h", "worker-1 on i"))
