"""Mailboxes when a process exits."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.cluster import environment

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import multiprocessing, os
from keras_distplug.cluster.listeners import close_at_exit

class Each:
    def close(self):
        print("closed by", "itself" if os.getpid() == pid else "its child", flush=True)

pid, each = os.getpid(), Each()
close_at_exit(each)
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join()
print("the child ended with", child.exitcode, flush=True)
"""


def test_forked() -> None:
    """A child process, such as one that loads data, does not close its parent's mailbox when it
    ends: it would send messages over the parent's connection."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=40,
        check=True,
    )
    assert ended.stdout == "the child ended with 0\nclosed by itself\n"
