"""Threads for calls that may hang."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keras_distplug.core.threads import run_in_daemon


def test_result() -> None:
    assert run_in_daemon(lambda: 42, "named").result(60) == 42


def test_error() -> None:
    def fails() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_in_daemon(fails, "named").result(60)


def test_process_exit() -> None:
    """The exit of the process does not wait for such a thread."""
    script = (
        "import threading\n"
        "from keras_distplug.core.threads import run_in_daemon\n"
        "run_in_daemon(threading.Event().wait, 'hangs')\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
