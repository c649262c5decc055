"""Training that is told to go by a signal, in one process."""

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
from keras_distplug.core.errors import AgreementError, ConfigurationError, Preempted  # noqa: E402
from keras_distplug.preemption import preemption_handler  # noqa: E402
from keras_distplug.preemption.notices.notice import Notice  # noqa: E402

TOLD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class At(small.Watching):
    """Does something behind a batch of an epoch."""

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


class Heard:
    """A handler of the script's own."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.came = threading.Event()

    def __call__(self, number: int, frame: Any) -> None:
        self.numbers.append(number)
        self.came.set()


@pytest.fixture(autouse=True)
def heard() -> Iterator[Heard]:
    own = Heard()
    before = {number: signal.signal(number, own) for number in TOLD}
    # A shell that runs the tests in the background makes them ignore it.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield own
    for number, handler in before.items():
        signal.signal(number, handler)


def me(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fit_by(number: signal.Signals) -> Callable[[], None]:
    """The same, from within `fit`; comes back when its handler has noticed."""

    def tell() -> None:
        _noticed.clear()
        me(number)()
        assert _noticed.wait(30)

    return tell


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


@pytest.mark.parametrize("number", TOLD)
def test_told_by_a_signal(number: signal.Signals, heard: Heard, tmp_path: Path) -> None:
    """Training ends at once with a checkpoint; called again, it goes on with the batch that comes
    next, to the bits of an undisturbed run. A handler of the script's own is called, too, and is
    there again."""
    expected = fit(tmp_path / "a")
    told = At(1, 1, fit_by(number))
    with pytest.raises(Preempted, match=f"{number.name} to worker-0 .* checkpoint of step"):
        fit(tmp_path / "b", told)
    assert heard.numbers == [number]
    assert signal.getsignal(number) is heard
    resumed = At(9, 9, fail)
    assert fit(tmp_path / "b", resumed) == expected
    assert (told.seen[-1], resumed.seen[0]) == ((1, 1), (1, 2))


def test_told_between_epochs(tmp_path: Path) -> None:
    """Told at the end of an epoch, training ends there."""
    expected = fit(tmp_path / "a")
    told = At(9, 9, fail)
    at_end = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epoch == 0 and fit_by(signal.SIGTERM)()
    )
    with pytest.raises(Preempted):
        fit(tmp_path / "b", told, at_end)
    resumed = At(9, 9, fail)
    assert fit(tmp_path / "b", resumed) == expected
    assert (told.seen[-1], resumed.seen[0]) == ((0, 3), (1, 0))


def test_exit_code(tmp_path: Path) -> None:
    """By default the process ends with the code 143."""
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, At(0, 1, fit_by(signal.SIGTERM)), exit=None)
    assert ended.value.code == 143


def test_ctrl_c(tmp_path: Path) -> None:
    """ctrl-C saves, too, and is KeyboardInterrupt."""
    expected = fit(tmp_path / "a")
    told = At(1, 1, fit_by(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "b", told)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = At(9, 9, fail)
    assert fit(tmp_path / "b", resumed) == expected
    assert (told.seen[-1], resumed.seen[0]) == ((1, 1), (1, 2))


def test_second_ctrl_c(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second ctrl-C does not wait for the batch under way."""
    said = threading.Event()

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "once more leaves at once" in record.getMessage():
                said.set()

    def hang() -> None:
        me(signal.SIGINT)()
        assert said.wait(20)
        me(signal.SIGINT)()
        assert not threading.Event().wait(60)
        raise AssertionError("still there")

    logging.getLogger("keras_distplug").addHandler(hears := Said())
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path, At(1, 1, hang))
    finally:
        logging.getLogger("keras_distplug").removeHandler(hears)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_fit_behind_one_that_failed(number: signal.Signals, tmp_path: Path) -> None:
    """A `fit` that has ended by an error leaves nothing in the way of the next one."""
    for folder in "ab":
        with pytest.raises(small.Interrupted):
            fit(tmp_path / folder, At(1, 0, fail))
    kind = KeyboardInterrupt if number is signal.SIGINT else Preempted
    with pytest.raises(kind):
        fit(tmp_path / "c", At(1, 0, fit_by(number)))
    with pytest.raises(small.Interrupted):
        fit(tmp_path / "d", At(1, 0, fail))
    with pytest.raises(KeyboardInterrupt):
        me(signal.SIGINT)()


def test_handler_that_comes_later(heard: Heard, tmp_path: Path) -> None:
    """A handler that is installed during `fit` stays, and reaches the script's own through ours."""
    later: list[int] = []

    def install() -> None:
        before: Any = signal.getsignal(signal.SIGTERM)

        def handler(number: int, frame: Any) -> None:
            later.append(number)
            before(number, frame)

        signal.signal(signal.SIGTERM, handler)

    fit(tmp_path, At(1, 0, install))
    me(signal.SIGTERM)()
    assert heard.came.wait(30)
    assert later == heard.numbers == [signal.SIGTERM]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children(heard: Heard, tmp_path: Path) -> None:
    """A signal to a forked child is the child's, which it ends, and nobody else's."""
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


def test_validation_at_the_end(heard: Heard, tmp_path: Path) -> None:
    """A signal that comes too late to stop training reaches the script when it has ended."""
    at_end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: me(signal.SIGTERM)())
    _, history = fit(tmp_path, at_end)
    assert len(history["loss"]) == 3
    assert heard.came.wait(30)
    assert heard.numbers == [signal.SIGTERM]


def test_handler_that_exits(tmp_path: Path) -> None:
    """A script's own handler that ends the process does so behind the checkpoint."""
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
def test_signal_behind_the_end(ends: Callable[[], None], heard: Heard, tmp_path: Path) -> None:
    """A signal that comes when `fit` has ended, even by an error, is the script's own."""
    with contextlib.suppress(small.Interrupted):
        fit(tmp_path, At(1, 0, ends))
    me(signal.SIGTERM)()
    assert heard.came.wait(30)
    assert heard.numbers == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is heard


def test_ignored_signal(tmp_path: Path) -> None:
    """A signal that the process ignores stays ignored."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    fit(tmp_path, At(1, 0, me(signal.SIGUSR1)))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_in_another_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where `fit` runs in another thread, training goes on without signals, which is said."""
    done = []
    thread = threading.Thread(target=lambda: done.append(fit(tmp_path)))
    thread.start()
    thread.join(100)
    assert done
    assert "signals are not noticed" in caplog.text


def test_told_in_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, where leaving would end a thread only, a cloud's notice makes `fit` raise."""
    announced = threading.Event()

    def poll() -> Notice:
        assert announced.wait(60)
        return Notice("AWS", "spot instance-action terminate", None, is_final=True)

    def tell() -> None:
        announced.set()
        assert told.wait(60)

    told = threading.Event()
    on_notice = kd.PreemptionHandler._on_notice

    def notice_and_tell(self: kd.PreemptionHandler, notice: Notice) -> None:
        on_notice(self, notice)
        told.set()

    monkeypatch.setattr(preemption_handler, "detect", lambda: "a cloud")
    monkeypatch.setattr(preemption_handler, "poller", lambda cloud: poll)
    monkeypatch.setattr(kd.PreemptionHandler, "_on_notice", notice_and_tell)
    raised: list[BaseException] = []

    def train() -> None:
        try:
            fit(tmp_path, At(1, 0, tell), cloud=True, exit=None)
        except BaseException as error:  # noqa: BLE001 (a SystemExit would be wrong)
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(100)
    assert [type(error) for error in raised] == [Preempted]
    assert "AWS spot instance-action terminate" in str(raised[0])


def test_no_time_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a checkpoint would take longer than there is time, the one before stands."""

    def tell() -> None:
        saver.wait_for_all()
        fit_by(signal.SIGTERM)()

    with pytest.raises(Preempted, match="the checkpoint of step 4"):
        fit(tmp_path, At(1, 1, tell), grace_secs=0)
    assert "no checkpoint of step" in caplog.text
    resumed = At(9, 9, fail)
    fit(tmp_path, resumed)
    assert resumed.seen[0] == (1, 0)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ('find "$RUNS" -name MANIFEST.json > "$RUNS/there"', "job 1234 is in Slurm's queue again"),
        ("echo 'not allowed'; exit 4", "start the job again yourself: exit code 4: not allowed"),
    ],
    ids=["done", "refused"],
)
def test_requeue(
    then: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Behind the checkpoint the job goes into Slurm's queue again; where that fails, it is told,
    and all else is as it would be without."""
    slurm = FakeSlurm(tmp_path / "bin", then)
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    with pytest.raises(Preempted, match="with the checkpoint of step") as ended:
        fit(tmp_path / "runs", At(1, 1, fit_by(signal.SIGTERM)), requeue=True)
    assert slurm.asked() == ["requeue 1234"]
    assert said in caplog.text
    if "find" in then:
        step = re.search(r"checkpoint of step (\d+)", str(ended.value))
        assert step is not None
        assert f"{int(step[1]):08d}" in (tmp_path / "runs" / "there").read_text()


def test_no_requeue_for_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has ended stays so."""
    slurm = FakeSlurm(tmp_path / "bin")
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "runs", At(1, 1, fit_by(signal.SIGINT)), requeue=True)
    assert slurm.asked() == []


def test_unusable_arguments(tmp_path: Path) -> None:
    """They are refused before training."""
    with pytest.raises(ConfigurationError, match="SIGKILL"):
        kd.PreemptionHandler([signal.SIGKILL])
    with pytest.raises(ConfigurationError, match="grace_secs"):
        kd.PreemptionHandler(grace_secs=-1)
    with pytest.raises(ConfigurationError, match="no SLURM_JOB_ID"):
        kd.PreemptionHandler(requeue=True)
    with pytest.raises(ConfigurationError, match=r"needs a keras_distplug\.BackupAndRestore"):
        small.model().fit(small.X, small.Y, verbose=0, callbacks=[kd.PreemptionHandler()])


class Own(kd.PreemptionHandler):
    """Of a user's class."""


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [kd.PreemptionHandler, Own])
def test_beside_that_of_defaults(
    kind: type[kd.PreemptionHandler], is_first: bool, tmp_path: Path
) -> None:
    """One of the user's own takes the place of that among `defaults()`, wherever it stands."""
    own = kind(exit=False, cloud=False)
    callbacks = [own, *kd.defaults(tmp_path)] if is_first else [*kd.defaults(tmp_path), own]
    callbacks.append(At(0, 0, fit_by(signal.SIGTERM)))
    with pytest.raises(Preempted):
        small.model().fit(small.X, small.Y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    assert own._received == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("cause", "is_told"), [(ConnectionError("closed"), False), (TimeoutError("slow"), True)]
)
def test_lost_words(cause: Exception, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """That a lost worker agrees to nothing more is no news of its own: `fit` ends with that."""
    error = AgreementError("no word")
    error.__cause__ = cause
    kd.PreemptionHandler()._on_lost(error)
    assert ("could not agree" in caplog.text) is is_told
