"""Preemption of training in a single process by a signal."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
from support import small  # noqa: E402
from support.slurm import FakeSlurm  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.checkpoint import saver  # noqa: E402
from keras_distplug.cluster.channel import Channel  # noqa: E402
from keras_distplug.core.errors import AgreementError, ConfigurationError, Preempted  # noqa: E402
from keras_distplug.preemption import preemption_handler  # noqa: E402
from keras_distplug.preemption.notices.notice import Notice  # noqa: E402

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class At(small.Watching):
    """Calls `act` after a batch of an epoch."""

    def __init__(self, epoch: int, batch: int, act: Callable[[], Any]) -> None:
        super().__init__()
        self.place = (epoch, batch)
        self.act = act
        self.seen: list[tuple[int, int]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((self.epoch, batch))
        if self.seen[-1] == self.place:
            self.act()


class Recorder:
    """A signal handler of the script."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.came = threading.Event()

    def __call__(self, number: int, frame: Any) -> None:
        self.numbers.append(number)
        self.came.set()


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recorder]:
    own = Recorder()
    before = {number: signal.signal(number, own) for number in SIGNALS}
    # A shell that runs the tests in the background makes them ignore SIGINT.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield own
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> Callable[[], None]:
    """Returns a function that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


def fit_by(number: signal.Signals) -> Callable[[], None]:
    """Like `send`, for use in `fit`; returns when the handler has noticed the signal."""

    def signal_and_wait() -> None:
        _noticed.clear()
        send(number)()
        assert _noticed.wait(30)

    return signal_and_wait


_noticed = threading.Event()


@pytest.fixture(autouse=True)
def noticing(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = kd.PreemptionHandler._on_signal

    def _on_signal(self: kd.PreemptionHandler, number: int) -> None:
        stock(self, number)
        _noticed.set()

    monkeypatch.setattr(kd.PreemptionHandler, "_on_signal", _on_signal)


def fit(folder: Path, *others: keras.callbacks.Callback, **ours: Any) -> Any:
    keras.utils.set_random_seed(5)
    model = small.model()
    x, y = small.X, small.Y
    backup = kd.BackupAndRestore(folder, delete_checkpoint=False)
    handler = kd.PreemptionHandler(**({"cloud": False, "exit": False} | ours))
    history = model.fit(
        x, y, batch_size=8, epochs=3, verbose=0, callbacks=[handler, backup, *others]
    )
    return small.state(model), history.history


@pytest.mark.parametrize("number", SIGNALS)
def test_preempted_by_signal(number: signal.Signals, recorder: Recorder, tmp_path: Path) -> None:
    """Training ends immediately with a checkpoint; the next call resumes with the next batch.

    The result is bit-identical to an uninterrupted run. The script's own handler is called and
    reinstalled.
    """
    expected = fit(tmp_path / "a")
    watched = At(1, 1, fit_by(number))
    with pytest.raises(Preempted, match=f"{number.name} to worker-0 .* checkpoint of step"):
        fit(tmp_path / "b", watched)
    assert recorder.numbers == [number]
    assert signal.getsignal(number) is recorder
    resumed = At(9, 9, fail)
    assert fit(tmp_path / "b", resumed) == expected
    assert (watched.seen[-1], resumed.seen[0]) == ((1, 1), (1, 2))


def test_saved_although_others_do_not_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A saved checkpoint is reported although the workers cannot wait for each other."""
    stock = Channel.barrier

    def barrier(self: Channel, topic: str, within_s: float | None = None) -> None:
        if topic == "leaving":
            raise AgreementError("worker-1 did not arrive")
        stock(self, topic, within_s)

    monkeypatch.setattr(Channel, "barrier", barrier)
    with pytest.raises(Preempted, match=r"ended with the checkpoint of step 6\."):
        fit(tmp_path, At(1, 1, fit_by(signal.SIGTERM)))
    assert "before exiting: worker-1 did not arrive" in caplog.text
    assert "no checkpoint could be saved" not in caplog.text
    assert "training ends with the checkpoint of step 6" in caplog.text
    assert (tmp_path / "run-0001" / "step-00000006").is_dir()


def test_preempted_between_epochs(tmp_path: Path) -> None:
    """Training that is preempted at the end of an epoch stops there."""
    expected = fit(tmp_path / "a")
    watched = At(9, 9, fail)
    at_end = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epoch == 0 and fit_by(signal.SIGTERM)()
    )
    with pytest.raises(Preempted):
        fit(tmp_path / "b", watched, at_end)
    resumed = At(9, 9, fail)
    assert fit(tmp_path / "b", resumed) == expected
    assert (watched.seen[-1], resumed.seen[0]) == ((0, 3), (1, 0))


def test_exit_code(tmp_path: Path) -> None:
    """By default the process exits with code 143."""
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, At(0, 1, fit_by(signal.SIGTERM)), exit=None)
    assert ended.value.code == 143


def test_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C saves, too, and raises KeyboardInterrupt."""
    expected = fit(tmp_path / "a")
    watched = At(1, 1, fit_by(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "b", watched)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = At(9, 9, fail)
    assert fit(tmp_path / "b", resumed) == expected
    assert (watched.seen[-1], resumed.seen[0]) == ((1, 1), (1, 2))


def test_second_ctrl_c(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second Ctrl-C does not wait for the current batch."""
    logged = threading.Event()

    class WaitForLine(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "again to exit immediately" in record.getMessage():
                logged.set()

    def hang() -> None:
        send(signal.SIGINT)()
        assert logged.wait(20)
        send(signal.SIGINT)()
        assert not threading.Event().wait(60)
        raise AssertionError("still running")

    logging.getLogger("keras_distplug").addHandler(waiting := WaitForLine())
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path, At(1, 1, hang))
    finally:
        logging.getLogger("keras_distplug").removeHandler(waiting)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_fit_after_error(number: signal.Signals, tmp_path: Path) -> None:
    """A `fit` that ended with an error does not affect the next one."""
    for folder in "ab":
        with pytest.raises(small.Interrupted):
            fit(tmp_path / folder, At(1, 0, fail))
    kind = KeyboardInterrupt if number is signal.SIGINT else Preempted
    with pytest.raises(kind):
        fit(tmp_path / "c", At(1, 0, fit_by(number)))
    with pytest.raises(small.Interrupted):
        fit(tmp_path / "d", At(1, 0, fail))
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)()


def test_later_handler(recorder: Recorder, tmp_path: Path) -> None:
    """A handler installed during `fit` stays, and reaches the script's own one through ours."""
    later: list[int] = []

    def install() -> None:
        before: Any = signal.getsignal(signal.SIGTERM)

        def handler(number: int, frame: Any) -> None:
            later.append(number)
            before(number, frame)

        signal.signal(signal.SIGTERM, handler)

    fit(tmp_path, At(1, 0, install))
    send(signal.SIGTERM)()
    assert recorder.came.wait(30)
    assert later == recorder.numbers == [signal.SIGTERM]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children(recorder: Recorder, tmp_path: Path) -> None:
    """A signal to a forked child ends the child and does not affect the parent."""
    codes = []

    def fork() -> None:
        child = multiprocessing.get_context("fork").Process(
            target=threading.Event().wait, args=(60,), daemon=True
        )
        child.start()
        child.terminate()
        child.join(30)
        codes.append(child.exitcode)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fit(tmp_path, At(1, 0, fork))
    assert codes == [-signal.SIGTERM]


def test_validation_at_the_end(recorder: Recorder, tmp_path: Path) -> None:
    """A signal that comes too late to stop training reaches the script after training."""
    at_end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: send(signal.SIGTERM)())
    _, history = fit(tmp_path, at_end)
    assert len(history["loss"]) == 3
    assert recorder.came.wait(30)
    assert recorder.numbers == [signal.SIGTERM]


def test_handler_that_exits(tmp_path: Path) -> None:
    """A script's own handler that exits the process does so after the checkpoint."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, At(1, 1, fit_by(signal.SIGTERM)))
    assert ended.value.code == 7
    resumed = At(9, 9, fail)
    fit(tmp_path, resumed)
    assert resumed.seen[0] == (1, 2)


def fail() -> None:
    raise small.Interrupted


@pytest.mark.parametrize("ends", [lambda: None, fail], ids=["end", "error"])
def test_signal_after_fit(ends: Callable[[], None], recorder: Recorder, tmp_path: Path) -> None:
    """A signal after `fit`, even after an error, goes to the script's own handler."""
    with contextlib.suppress(small.Interrupted):
        fit(tmp_path, At(1, 0, ends))
    send(signal.SIGTERM)()
    assert recorder.came.wait(30)
    assert recorder.numbers == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is recorder


def test_ignored_signal(tmp_path: Path) -> None:
    """A signal that the process ignores remains ignored."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    fit(tmp_path, At(1, 0, send(signal.SIGUSR1)))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_in_another_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If `fit` runs in another thread, signals are not noticed, and this is logged."""
    done = []
    thread = threading.Thread(target=lambda: done.append(fit(tmp_path)))
    thread.start()
    thread.join(100)
    assert done
    assert "no checkpoint is saved on signals" in caplog.text


def test_notice_in_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread, where an exit would end only that thread, a notice makes `fit` raise."""
    announced = threading.Event()

    def poll() -> Notice:
        assert announced.wait(60)
        return Notice("AWS", "spot instance-action terminate", None, is_final=True)

    def announce() -> None:
        announced.set()
        assert handled.wait(60)

    handled = threading.Event()
    on_notice = kd.PreemptionHandler._on_notice

    def handle_notice(self: kd.PreemptionHandler, notice: Notice) -> None:
        on_notice(self, notice)
        handled.set()

    monkeypatch.setattr(preemption_handler, "detect", lambda: "a cloud")
    monkeypatch.setattr(preemption_handler, "poller", lambda cloud: poll)
    monkeypatch.setattr(kd.PreemptionHandler, "_on_notice", handle_notice)
    raised: list[BaseException] = []

    def train() -> None:
        try:
            fit(tmp_path, At(1, 0, announce), cloud=True, exit=None)
        except BaseException as error:  # noqa: BLE001 (a SystemExit would be wrong)
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(100)
    assert [type(error) for error in raised] == [Preempted]
    assert "AWS notice of spot instance-action terminate" in str(raised[0])


def test_no_time_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If there is no time for a checkpoint, the previous one is used."""

    def preempt() -> None:
        saver.wait_for_all()
        fit_by(signal.SIGTERM)()

    with pytest.raises(Preempted, match="the checkpoint of step 4"):
        fit(tmp_path, At(1, 1, preempt), grace_secs=0)
    assert "no checkpoint of step" in caplog.text
    resumed = At(9, 9, fail)
    fit(tmp_path, resumed)
    assert resumed.seen[0] == (1, 0)


@pytest.mark.parametrize(
    ("then", "logged"),
    [
        ('find "$RUNS" -name MANIFEST.json > "$RUNS/there"', "job 1234 is in Slurm's queue again"),
        ("echo 'not allowed'; exit 4", "restart the job yourself: exit code 4: not allowed"),
    ],
    ids=["done", "refused"],
)
def test_requeue(
    then: str,
    logged: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The job is requeued after the checkpoint; a failure is logged and has no other effect."""
    slurm = FakeSlurm(tmp_path / "bin", then)
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    with pytest.raises(Preempted, match="with the checkpoint of step") as ended:
        fit(tmp_path / "runs", At(1, 1, fit_by(signal.SIGTERM)), requeue=True)
    assert slurm.asked() == ["requeue 1234"]
    assert logged in caplog.text
    if "find" in then:
        step = re.search(r"checkpoint of step (\d+)", str(ended.value))
        assert step is not None
        assert f"{int(step[1]):08d}" in (tmp_path / "runs" / "there").read_text()


def test_no_requeue_for_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that the user has stopped is not requeued."""
    slurm = FakeSlurm(tmp_path / "bin")
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "runs", At(1, 1, fit_by(signal.SIGINT)), requeue=True)
    assert slurm.asked() == []


def test_unusable_arguments(tmp_path: Path) -> None:
    """Invalid arguments are refused before training."""
    with pytest.raises(ConfigurationError, match="SIGKILL"):
        kd.PreemptionHandler([signal.SIGKILL])
    with pytest.raises(ConfigurationError, match="grace_secs"):
        kd.PreemptionHandler(grace_secs=-1)
    with pytest.raises(ConfigurationError, match="no SLURM_JOB_ID"):
        kd.PreemptionHandler(requeue=True)
    with pytest.raises(ConfigurationError, match=r"Expected a keras_distplug\.BackupAndRestore"):
        small.model().fit(small.X, small.Y, verbose=0, callbacks=[kd.PreemptionHandler()])


class Own(kd.PreemptionHandler):
    """A user's subclass."""


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [kd.PreemptionHandler, Own])
def test_replaces_default(kind: type[kd.PreemptionHandler], is_first: bool, tmp_path: Path) -> None:
    """A handler of the user replaces the one of `defaults()`, in any order."""
    own = kind(exit=False, cloud=False)
    callbacks = [own, *kd.defaults(tmp_path)] if is_first else [*kd.defaults(tmp_path), own]
    callbacks.append(At(0, 0, fit_by(signal.SIGTERM)))
    with pytest.raises(Preempted):
        small.model().fit(small.X, small.Y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    assert own._received == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("cause", "is_logged"), [(ConnectionError("closed"), False), (TimeoutError("slow"), True)]
)
def test_failed_agreement(
    cause: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed agreement is logged, except with a lost worker, which `fit` itself reports."""
    error = AgreementError("no message")
    error.__cause__ = cause
    kd.PreemptionHandler()._on_lost(error)
    assert ("cannot exchange messages" in caplog.text) is is_logged
