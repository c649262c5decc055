"""Faults of all kinds, one after another, on a job with all watchdogs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
from support import fault_matrix, harmed
from support.fault_matrix import ALL, MIRRORED, SERVERS, TWO_WORKERS, Faults
from support.harmed import Ended, Job, SetUp

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

Train = Callable[[SetUp, Faults], Ended]

IN_CI = [
    (MIRRORED, fault_matrix.deaths),
    *(each for each in ALL if each[0] in (TWO_WORKERS, SERVERS)),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    @cache
    def train(set_up: SetUp, faults: Faults) -> Ended:
        folder = tmp_path_factory.mktemp("job")
        job = Job(set_up, str(folder / "runs"), epochs=fault_matrix.epochs(set_up))
        return harmed.run(folder, job, faults(set_up.workers - 1), timeout_s=800)

    return train


@pytest.mark.parametrize(
    ("set_up", "faults"),
    [
        pytest.param(
            *each,
            id=f"{each[0].title}: {each[1].__name__}",
            marks=[] if each in IN_CI else [pytest.mark.soak],
        )
        for each in ALL
    ],
)
def test_faults(train: Train, set_up: SetUp, faults: Faults) -> None:
    """Every fault occurs exactly once, and its cause and process are named.

    Only the batches since the newest checkpoint are repeated. The result is bit-identical to that
    of an uninterrupted run with the same data. (With parameter servers, all steps are taken.)
    """
    ended = train(set_up, faults)
    job = Job(set_up, "", epochs=fault_matrix.epochs(set_up))
    assert list(fault_matrix.wrong(ended.results, job)) == [], ended.printed
    for each in ended.results:
        assert each.fault.moment == "data" or each.came == 1, each
    if set_up is SERVERS:
        [outcome] = ended.outcomes
        done = job.epochs * job.batches
        # A step is repeated if its worker is killed after it, before reporting it.
        assert done <= outcome["iterations"] <= done + 1
        return
    if faults is fault_matrix.hangs:
        # In the format of `traceback`, or of `faulthandler` if the interpreter's lock was held.
        assert re.search(r'File "\S*harm.py", line \d+,? in _do', ended.printed)
    expected = train(set_up, fault_matrix.data).outcomes[0]
    for outcome in ended.outcomes:
        assert harmed.differences(outcome, expected) == []
