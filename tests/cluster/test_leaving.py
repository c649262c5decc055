"""Exit codes after errors of this package, in processes without TensorFlow."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from support.cluster import environment

BEGIN = """
import atexit, ctypes, sys, time
from keras_distplug.cluster import leaving
from keras_distplug.core.errors import PeerLostError
leaving.prepare()
atexit.register(lambda: print("last words"))
leaving.note_lost_peer()
"""
LOST = 'PeerLostError("worker-1 is gone")'
CAUGHT = f"try: raise {LOST}\nexcept PeerLostError: pass\n"
# Runs after all of Python's exit functions, like TensorFlow's shutdown, and waits forever.
ENDLESS = "ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).pause)\n"


def run(
    script: str, *options: str, begin: str = BEGIN, env: dict[str, str] | None = None
) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *options, "-c", begin + script],
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (f"raise {LOST}", 201),
        (f"{ENDLESS}raise {LOST}", 201),
        (f"raise RuntimeError('no training') from {LOST}", 201),
        (f"try: raise {LOST}\nfinally: raise ValueError('a second one')", 201),
        ("raise ValueError('another one')", 1),
        (f"{CAUGHT}", 0),
        (f"{CAUGHT}sys.exit(7)", 7),
        (f"{CAUGHT}leaving._END_S = 0.5\n{ENDLESS}", -signal.SIGALRM),
    ],
    ids=["unhandled", "endless", "cause", "context", "other", "caught", "own code", "alarm"],
)
def test_code(script: str, code: int) -> None:
    """If it is unhandled, the error always ends the process with 201; if it is handled, the exit
    code is the script's, provided that the interpreter finishes. Exit functions are called."""
    ended, printed = run(script)
    assert ended == code, printed
    assert printed.endswith("last words\n")
    assert ("worker-1 is gone" in printed) is (code == 201)


def test_hanging_exit_function() -> None:
    """A function at exit that does not return is abandoned."""
    hangs = "leaving._LAST_WORDS_S = 0.5\natexit.register(lambda: time.sleep(100))\n"
    ended, printed = run(f"{hangs}raise {LOST}")
    assert ended == 201, printed
    assert "last words" not in printed


def test_exit_with_our_code() -> None:
    """A process that leaves with a code of this package always exits with that code."""
    ended, printed = run(f"{ENDLESS}leaving.set_exit_code(143)\nsys.exit(143)")
    assert (ended, printed) == (143, "last words\n")


def test_exit_code_after_notifying_others() -> None:
    """An error of this package keeps its code even if the other workers are notified."""
    env = {"TF_CONFIG": TASK}
    script = "print('told', error); return 1"
    begin = f"""
import atexit
from keras_distplug.cluster import leaving, rendezvous
from keras_distplug.core.errors import DataError
rendezvous.report_failure = lambda *_: None
def tell(error): {script}
leaving.consult(tell)
leaving.prepare()
"""
    assert run(f"raise {UNUSABLE}", begin=begin, env=env)[0] == 93
    ended, printed = run("raise ValueError('another')", begin=begin, env=env)
    assert (ended, "told another" in printed) == (1, True)


@pytest.mark.parametrize(("task", "is_told"), [("worker", True), ("evaluator", False)])
def test_failures_that_are_reported(task: str, is_told: bool) -> None:
    """The error of an evaluator does not end training."""
    cluster = {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]}
    env = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}})}
    begin = """
import keras_distplug
from keras_distplug.cluster import rendezvous
rendezvous.report_failure = lambda role, error: print("told", error)
"""
    ended, printed = run("raise ValueError('no data')", begin=begin, env=env)
    assert (ended, "told ValueError: no data" in printed) == (1, is_told)


def test_hook_of_the_script() -> None:
    """An exception hook that the script installed is called."""
    hook = "sys.excepthook = lambda kind, error, trace: print('mine:', error)\n"
    ended, printed = run(f"{hook}leaving.note_lost_peer()\nraise {LOST}")
    assert ended == 201
    assert "mine: worker-1 is gone" in printed


def test_interactive() -> None:
    """In an interactive session, the interpreter keeps running."""
    ended, printed = run(f"raise {LOST}", "-i")
    assert ended == 0, printed
    assert "worker-1 is gone" in printed


UNUSABLE = 'DataError("no samples")'
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
TASK = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'


@pytest.mark.parametrize(
    ("env", "script", "code"),
    [
        ({"TF_CONFIG": TASK}, f"raise {UNUSABLE}", 93),
        ({"TF_CONFIG": "no JSON"}, f"raise {UNUSABLE}", 93),
        (STEP, f"raise {UNUSABLE}", 93),
        ({"TF_CONFIG": TASK}, f"raise RuntimeError('no training') from {UNUSABLE}", 93),
        ({"TF_CONFIG": TASK}, f"try: raise {UNUSABLE}\nexcept ValueError: int('another')", 1),
        ({"TF_CONFIG": TASK}, "raise ValueError('another')", 1),
        ({"TF_CONFIG": TASK}, f"try: raise {UNUSABLE}\nexcept ValueError: sys.exit(7)", 7),
        ({"TF_CONFIG": "{}"}, f"raise {UNUSABLE}", 1),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, f"raise {UNUSABLE}", 1),
        ({}, f"raise {UNUSABLE}", 1),
    ],
    ids=[
        *("TF_CONFIG", "unreadable", "Slurm", "cause", "context", "other", "caught"),
        *("no cluster", "one task", "nobody"),
    ],
)
def test_unusable(env: dict[str, str], script: str, code: int) -> None:
    """An uncaught `ConfigurationError` ends a process with 93 if a scheduler started it, as soon as
    the package is imported. Otherwise, the code is 1, and nothing changes."""
    begin = """
import atexit, sys
import keras_distplug
from keras_distplug.core.errors import DataError
atexit.register(lambda: print("last words"))
print("stock" if sys.excepthook is sys.__excepthook__ else "ours")
if sys.excepthook is not sys.__excepthook__:
    from keras_distplug.cluster.rendezvous import waiting
    waiting._FAREWELL_SECS = waiting._FAREWELL_OF_SLURM_SECS = 0.1  # no other worker exists
"""
    ended, printed = run(script, begin=begin, env=env)
    assert ended == code, printed
    assert printed.endswith("last words\n")
    if code == 93:
        assert "DataError: no samples" in printed
    if not env:
        assert printed.startswith("stock")
