"""A watched training in one process, with `exit=False`."""

from __future__ import annotations

import io
import math
import pdb
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
from support import small  # noqa: E402
from support.cluster import environment  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402
from keras_distplug.hang import hang_watchdog  # noqa: E402

LIMIT_S = 1.0


@pytest.fixture(autouse=True)
def hang(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until the watchdog has reported this hang: on a busy machine, it may also report slow
    code."""
    said = threading.Event()
    write = hang_watchdog._write

    def note(text: str) -> None:
        write(text)
        if " in hang" in text:
            said.set()

    monkeypatch.setattr(hang_watchdog, "_write", note)

    def hang() -> None:
        said.clear()
        assert said.wait(60)

    return hang


class Act(keras.callbacks.Callback):
    """Calls a function, once, at a hook."""

    def __init__(self, hook: str, act: Callable[[], Any]) -> None:
        super().__init__()
        acts = [act]
        setattr(self, hook, lambda *_, **__: acts.pop()() if acts else None)


class Slow(keras.utils.PyDataset):
    """A dataset whose last batch is late in the second epoch."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.asked = 0
        self.act = act

    def __len__(self) -> int:
        return small.BATCHES

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        self.asked += number == small.BATCHES - 1
        if number == small.BATCHES - 1 and self.asked == 2:
            self.act()
        part = slice(number * 8, number * 8 + 8)
        return small.X[part], small.Y[part]


def fit(watchdog: kd.HangWatchdog, x: Any, *others: Any, **arguments: Any) -> None:
    small.model().fit(x, epochs=2, callbacks=[*others, watchdog], verbose=0, **arguments)


def watchdog(**limits: Any) -> kd.HangWatchdog:
    return kd.HangWatchdog(exit=False, **limits)


def test_input(hang: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> None:
    """A blocked input is reported, with the stacks, once."""
    fit(watchdog(step_secs=LIMIT_S), Slow(hang), shuffle=False)
    printed = capfd.readouterr().err
    # Keras 3.16 fetches the input before the step, so the wait for it is visible.
    does = r"(is|waits for its input) in batch 4 of epoch 2, with its input"
    assert len(re.findall(f"training hangs: worker-0 {does}", printed)) == 1
    assert "produced at test_hang_watchdog.py:" in printed
    assert "Thread 'MainThread'" in printed


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        ("on_train_batch_end", "after batch 1 of epoch 1"),
        ("on_epoch_end", "at the end of epoch 1"),
        ("on_test_begin", "before the validation of epoch 1"),
        ("on_test_batch_end", "after batch 1 of the validation of epoch 1"),
    ],
)
def test_callback(
    hook: str, told: str, hang: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """A callback that does not return is reported with its line; its time does not count as that of
    a batch."""
    fit(watchdog(save_secs=LIMIT_S), small.dataset(), Act(hook, hang), validation_data=Slow(int))
    printed = capfd.readouterr().err
    assert f"training hangs: worker-0 runs test_hang_watchdog.py:{line_of_wait()} in" in printed
    assert f", {told}, for " in printed


def test_before_the_first_batch(
    hang: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """The work of other callbacks when `fit` starts, such as restoring, is watched at any
    position."""
    fit(watchdog(first_step_secs=LIMIT_S), small.dataset(), Act("on_train_begin", hang))
    assert f":{line_of_wait()} in hang, before the first batch, for " in capfd.readouterr().err


def line_of_wait() -> int:
    """Returns the line that waits in `hang`."""
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(n for n, line in enumerate(lines) if "said.wait(60)" in line)


def test_stacks_are_saved(tmp_path: Path, hang: Callable[[], None]) -> None:
    """The stacks are saved alongside the run, and do not disturb it."""
    backup = kd.BackupAndRestore(tmp_path / "run", delete_checkpoint=False)
    fit(watchdog(save_secs=LIMIT_S), small.dataset(), Act("on_epoch_end", hang), backup)
    [kept] = (tmp_path / "run" / "hangs").iterdir()
    assert "worker-0" in kept.name
    assert "training hangs" in kept.read_text()
    more = kd.BackupAndRestore(tmp_path / "run")
    small.model().fit(small.dataset(), epochs=3, callbacks=[more], verbose=0)


def test_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    """Training within its limits is not reported, and no threads or processes remain."""
    before = set(threading.enumerate())
    watched = watchdog()
    fit(watched, Slow(int), validation_data=small.dataset())
    assert "hangs" not in capfd.readouterr().err
    assert not set(threading.enumerate()) - before


def test_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in a debugger does not count as a hang."""
    looked = threading.Semaphore(0)
    is_debugged = hang_watchdog.is_debugged
    watched = watchdog(save_secs=LIMIT_S)
    stood_s: list[float] = []  # every check must find it after one that found a debugger

    def look(thread: int) -> bool:
        found = is_debugged(thread)
        if found and look.found:
            stood_s.append(watched._stall[1])
            looked.release()
        look.found = found
        return found

    look.found = False
    monkeypatch.setattr(hang_watchdog, "is_debugged", look)
    fit(watched, small.dataset(), Act("on_epoch_end", lambda: stand(looked)))
    assert len(stood_s) * hang_watchdog._LOOK_S > LIMIT_S
    assert set(stood_s) == {0.0}


def stand(looked: threading.Semaphore) -> None:
    """Stops at a `pdb` prompt until the watchdog has checked for longer than its limit. Variables
    changed at the prompt stay changed."""
    value, said = 1, iter(["value = 2\n", "continue\n"])

    class Prompt(io.StringIO):
        def readline(self, *_: Any) -> str:
            for _look in range(6):
                assert looked.acquire(timeout=60)
            return next(said)

    pdb.Pdb(stdin=Prompt(), stdout=io.StringIO(), nosigint=True).set_trace()
    assert value == 2


@pytest.mark.parametrize("is_there", [True, False])
def test_debugger_of_an_editor(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a debugger that stops all threads, the sentinel gets an infinite limit."""
    told: list[float] = []

    class RecordingSentinel:
        def __init__(self, worker: str, limit_s: float) -> None: ...

        def say(self, limit_s: float) -> None:
            told.append(limit_s)

        def close(self) -> None: ...

    monkeypatch.setattr(hang_watchdog, "Sentinel", RecordingSentinel)
    if is_there:
        monkeypatch.setitem(sys.modules, "pydevd", ModuleType("pydevd"))
    fit(kd.HangWatchdog(exit=True), small.dataset())
    assert {math.isinf(each) for each in told} == {is_there}


def test_report_after_progress() -> None:
    """A report right after progress does not include earlier waiting time."""
    watched, reported = watchdog(), []

    def wait() -> None:
        while watched._report().for_s < LIMIT_S:
            threading.Event().wait(0.05)

    acts = Act("on_epoch_begin", wait), Act("on_train_batch_begin", lambda: report())

    def report() -> None:
        reported.append(watched._report().for_s)

    fit(watched, small.dataset(), *acts)
    assert reported[0] < LIMIT_S


def test_evaluate() -> None:
    """`evaluate` accepts the callbacks of a `fit` that has not been called."""
    small.model().evaluate(small.dataset(), callbacks=[watchdog()], verbose=0)


NOBODY_READS = """
import os
import keras
import keras_distplug as kd
from support import small

class Talks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        while True:
            os.write(2, bytes(4096))

watchdog = kd.HangWatchdog(save_secs=1.0)
small.model().fit(small.dataset(), callbacks=[Talks(), watchdog], verbose=0)
"""


def test_output_is_not_read() -> None:
    """A process whose output is not read hangs, and is ended, too."""
    process = subprocess.Popen(
        [sys.executable, "-c", NOBODY_READS], env=environment(), stderr=subprocess.PIPE
    )
    try:
        assert process.wait(100) == 200
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_error_in_fit() -> None:
    """A `fit` that was ended by an error is no longer watched."""
    watched = watchdog()
    with pytest.raises(small.Interrupted):
        fit(watched, small.dataset(), small.Stop(1, 2))
    for each in threading.enumerate():
        if each.name == "keras_distplug-hangs":
            each.join(30)
            assert not each.is_alive()


def test_later_hangs_are_reported(
    hang: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """With `exit=False`, later hangs are reported, too."""
    acts = Act("on_epoch_end", hang), Act("on_test_begin", hang)
    fit(watchdog(save_secs=LIMIT_S), small.dataset(), *acts, validation_data=small.dataset())
    told = capfd.readouterr().err
    for place in ("at the end of epoch 1", "before the validation of epoch 1"):
        assert f":{line_of_wait()} in hang, {place}" in told


@pytest.mark.parametrize(
    "unusable",
    [
        {"step_secs": 0},
        {"step_secs": "5min"},
        {"first_step_secs": "auto"},
        {"validation_secs": -1},
        {"save_secs": True},
        {"save_secs": float("nan")},
    ],
)
def test_unusable(unusable: dict[str, Any]) -> None:
    """Invalid arguments are refused immediately, by name."""
    [name] = unusable
    with pytest.raises(ConfigurationError, match=f"Expected `{name}` to be a number of seconds"):
        kd.HangWatchdog(**unusable)
