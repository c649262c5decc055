from __future__ import annotations

import subprocess

import pytest

from keras_distplug.supervisor.guard import Guard, groups_left

_NOBODY = 999_999_999  # above every system's largest pid


@pytest.mark.parametrize(
    ("messages", "left"),
    [
        ([], set()),
        (["started 5\n", "started 6\n"], {5, 6}),
        (["started 5\n", "started 6\n", "ended 5\n"], {6}),
        (["started 5\n", "farewell\n"], set()),
        (["started 5\n", "started 61"], {5}),
    ],
)
def test_groups_left(messages: list[str], left: set[int]) -> None:
    """Only groups that were started, not reported as ended, and not cut off are killed."""
    assert groups_left(messages) == left


def test_farewell_spares_the_living() -> None:
    """A guard that was dismissed kills nobody."""
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as sleeper:
        with Guard() as guard:
            guard.started(sleeper.pid)
        try:
            assert sleeper.poll() is None
        finally:
            sleeper.kill()


def test_killed_guard(capfd: pytest.CaptureFixture[str]) -> None:
    """The death of the guard is said once and ends nothing."""
    with Guard() as guard:
        guard._process.kill()
        guard._process.wait()
        guard.started(_NOBODY)
        guard.ended(_NOBODY)
    assert capfd.readouterr().err.count("the guard process is gone") == 1
