"""Leaving with a checkpoint when the machine is about to go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from keras_distplug.backend.tensorflow.runtime import callback_list
from keras_distplug.backend.tensorflow.runtime.context import ServiceKeyValues
from keras_distplug.callbacks.run_keeper import keeper_among
from keras_distplug.callbacks.watchdog import Watchdog
from keras_distplug.cluster import agreement, leaving
from keras_distplug.core import operating_system
from keras_distplug.core.errors import AgreementError, ConfigurationError, DistplugError, Preempted
from keras_distplug.core.events import Preempted as PreemptedEvent
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.interactive import is_interactive
from keras_distplug.core.log import announce
from keras_distplug.core.reporting import report
from keras_distplug.core.supervised import Phase, Supervised
from keras_distplug.preemption.notices.clouds import detect, poller
from keras_distplug.preemption.notices.notice import Notice
from keras_distplug.preemption.notices.watcher import Watcher
from keras_distplug.preemption.requeue import Requeue
from keras_distplug.preemption.signal_watch import SignalWatch
from keras_distplug.preemption.stopping import Cause, Stop, StopTogether
from keras_distplug.preemption.told_to_tensorflow import NoticeToTensorFlow

_LEAVING_S = 60.0  # for others whose save has failed in another way
_SIGNALS = operating_system.signals("SIGTERM", "SIGUSR1", "SIGUSR2")


class PreemptionHandler(Watchdog):
    """Makes a checkpoint and ends training when the process is told to go.

    It is told by a signal (Kubernetes and Slurm send SIGTERM, `sbatch --signal=USR1@120` SIGUSR1,
    a person ctrl-C), or by the metadata server of AWS, Google Cloud or Azure, which it asks where
    it runs on one of their machines. A signal is noticed within milliseconds, also while training
    waits for another worker. Whichever worker is told, all of them agree on one step, save behind
    it, and leave with the code 143, which schedulers take as worth another try. Started again, the
    script goes on with the batch that comes next.

    Example:

    ```python
    longer = kd.PreemptionHandler(grace_secs=120)
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), longer])
    ```

    - It is among `defaults()`; one of your own takes its place.
    - ctrl-C is the user's: the first one saves and raises `KeyboardInterrupt`, for which
      `keras-distplug run` does not start the job again; the second one leaves at once.
    - Several workers also stop for a SIGTERM that TensorFlow has taken, such as one before `fit`.
    - A validation under way is finished first.
    - Handlers that the script had are called behind the checkpoint, and are there again after
      `fit`. A signal that comes too late to stop training is sent once more when it has ended.
    - The process ends within `fit`: `on_train_end` of other callbacks is not called.
    - Python hears signals in the main thread only. Where `fit` is called in another one, several
      workers still stop for a SIGTERM, of which TensorFlow tells; one alone does not.

    Args:
        signals: Which signals tell to go. Defaults to SIGTERM, SIGUSR1 and SIGUSR2, where they
            exist. One that the process ignores stays ignored.
        grace_secs: The time between a signal and the end of the machine. A checkpoint that would
            take longer than what is left of it is not begun; the newest one then is the local one,
            or the one before. Defaults to 30, that of Kubernetes.
        exit: End the process, with code 143. With `False`, `fit` raises `Preempted` instead.
            Defaults to `True` but where Python is interactive, and where `fit` is called in another
            thread than the main one, as in Ray Train, which starts the workers again for an error.
        cloud: Ask the metadata server of the cloud that this machine belongs to. Defaults to
            `True`. **Not verified on a machine of any cloud.**
        requeue: Under Slurm, put the job into the queue again, behind the checkpoint, by `scontrol
            requeue`; not for ctrl-C, and not after `scancel`. The job must allow it (`sbatch
            --requeue`). If it fails, that is reported, and training ends as it would without.
            Defaults to `False`. Tested with Slurm 22.05, with two nodes on one machine.

    Raises:
        ConfigurationError: For an argument that is not usable, such as `requeue=True` outside a job
            of Slurm's or without `scontrol` on PATH; in `fit`, if there is no `BackupAndRestore` of
            ours among the callbacks.
        Preempted: In `fit`, with `exit=False`.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = _SIGNALS,
        *,
        grace_secs: float = 30.0,
        exit: bool | None = None,
        cloud: bool = True,
        requeue: bool = False,
    ) -> None:
        super().__init__()
        unusable = operating_system.signals("SIGKILL", "SIGSTOP", "SIGINT")
        if set(unusable) & set(signals):
            raise ConfigurationError(
                "SIGKILL and SIGSTOP cannot be handled, and SIGINT is always. Received: signals="
                f"{[signal.Signals(n).name for n in signals]}"
            )
        if grace_secs < 0:
            raise ConfigurationError(f"Expected `grace_secs` to be >= 0. Received: {grace_secs}")
        self.signals = tuple(signals)
        self.grace_secs = grace_secs
        self.exit = exit
        self.cloud = cloud
        self.requeue = requeue
        self._requeue = Requeue.from_environment(os.environ) if requeue else None
        self._received: list[int] = []
        self._undo: list[Callable[[], None]] = []

    # Keras' hooks, in the order in which they come

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        others = callback_list.move_to_end(self)
        keeper = keeper_among(others)
        if keeper is None:
            raise ConfigurationError(
                "PreemptionHandler needs a keras_distplug.BackupAndRestore to save with. Received: "
                f"{', '.join(type(each).__name__ for each in others) or 'no'} other callbacks. Add "
                "those of `keras_distplug.defaults()`."
            )
        self._end()
        if self.stands_aside(others):
            return
        self._keeper = keeper
        self._role = agreement.role_under(self.model.distribute_strategy)
        self._agreement = agreement.among(self._role)
        self._where = f"{self._role.name} on {socket.gethostname()}"
        self._received = []
        self._fit = callback_list.Calling.now()
        self._stop = Stop()
        if self._role.world_size > 1:
            self._stop = together = StopTogether(self._agreement.session("stop"), self._on_lost)
            self._undo.append(together.close)
            if self._role.is_chief:
                notice = NoticeToTensorFlow(ServiceKeyValues(), self._on_notice_to_tensorflow)
                self._undo.append(notice.close)
        self._watch = self._watch_signals()
        if self.cloud and (cloud := detect()) is not None:
            self._undo.append(Watcher(poller(cloud), self._on_notice).close)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if (cause := self._stop.is_due()) is not None:
            self._leave(cause, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        ends = self.model.stop_training or epoch + 1 == self.params["epochs"]
        if not ends and (cause := self._stop.is_due()) is not None:
            self._leave(cause, logs)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        # Until all are here, somebody may still ask at which step to stop.
        self._agreement.barrier("end of training")
        self._end()
        # What came too late to stop training is for who is told next: mostly, to end the process.
        for number in self._received:
            signal.raise_signal(number)

    # How

    def _watch_signals(self) -> SignalWatch | None:
        if not _in_main_thread():
            if self._role.is_chief:
                which = "signals" if self._role.world_size == 1 else "signals but SIGTERM"
                announce(f"{which} are not noticed, because `fit` is not called in the main thread")
            return None
        watch = SignalWatch((*self.signals, signal.SIGINT), self._on_signal, self._is_in_fit)
        watch.install()
        self._undo.append(watch.remove)
        return watch

    def _is_in_fit(self, frame: FrameType | None) -> bool:
        """False if an exception has ended `fit`."""
        return self._fit is not None and self._fit.is_above(frame)

    def _on_signal(self, number: int) -> None:
        """From a thread."""
        self._received.append(number)
        is_user = number == signal.SIGINT
        if is_user:
            if self._received.count(number) > 1:
                self._leave_at_once()
                return
            announce("ctrl-C: a checkpoint comes behind this batch; once more leaves at once")
        at_unix_s = time.time() + self.grace_secs
        self._stop.tell(Cause(signal.Signals(number).name, self._where, at_unix_s, is_user))

    def _leave_at_once(self) -> None:
        if self._role.world_size > 1:
            # The main thread may wait for another worker, for ever.
            os._exit(ExitCode.INTERRUPTED)
        if self._watch is not None:
            self._watch.hand_over(signal.SIGINT)

    def _on_notice(self, notice: Notice) -> None:
        """From a thread."""
        what = f"{notice.source} {notice.announced}"
        if not notice.is_final:
            announce(f"{what} on {self._where}; training goes on")
            return
        at_unix_s = notice.at_unix_s or time.time() + self.grace_secs
        self._stop.tell(Cause(what, self._where, at_unix_s))

    def _on_notice_to_tensorflow(self, worker: str) -> None:
        """From a thread."""
        what, at_unix_s = "TensorFlow's notice of preemption", time.time() + self.grace_secs
        self._stop.tell(Cause(what, worker, at_unix_s))

    def _on_lost(self, error: AgreementError) -> None:
        """From a thread."""
        if isinstance(error.__cause__, ConnectionError):
            return  # a lost worker ends `fit`, which tells
        announce(f"the workers could not agree on a step to stop at: {error}")

    def _leave(self, cause: Cause, logs: Mapping[str, Any] | None) -> None:
        told = f"{cause.what} to {cause.worker}"
        try:
            stands = self._save(cause, logs)
            self._agreement.barrier("leaving", _LEAVING_S)
        except DistplugError as error:
            stands = None
            announce(f"{told}: no checkpoint could be made: {error}")
        what = "no new checkpoint" if stands is None else f"the checkpoint of step {stands}"
        report(PreemptedEvent(cause.what, cause.worker, cause.is_user, stands))
        if self._role.is_chief:
            announce(f"{told}: training ends with {what}; start the script again to go on")
        if stands is not None and (supervised := Supervised.from_env()) is not None:
            supervised.report(self._role.name, Phase.PREEMPTED)
        # Slurm tells us once more to go, which must not end us before it has heard.
        if self._requeue is not None and not cause.is_user:
            self._put_into_the_queue(self._requeue, others_wait=stands is not None)
        earlier = [(n, self._watch.handler_before(n)) for n in self._received if self._watch]
        self._end()
        for number, handler in earlier:
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, None)
        if cause.is_user or signal.SIGINT in self._received:
            raise KeyboardInterrupt
        if self.exit or (self.exit is None and not is_interactive() and _in_main_thread()):
            if self._role.cluster:
                leaving.with_code(ExitCode.PREEMPTED)
            sys.exit(ExitCode.PREEMPTED)
        raise Preempted(
            f"{told}. Training has ended with {what}. Call `fit` again, or start the "
            "script again, to go on."
        )

    def _put_into_the_queue(self, requeue: Requeue, *, others_wait: bool) -> None:
        if self._role.is_chief and signal.SIGINT not in self._received:
            announce(requeue.ask())
        if others_wait:
            # `srun --kill-on-bad-exit` ends all tasks, the chief among them, when one has left.
            with contextlib.suppress(AgreementError):
                self._agreement.barrier("queue")

    def _save(self, cause: Cause, logs: Mapping[str, Any] | None) -> int | None:
        """The step of the newest checkpoint that this `fit` has made."""
        word = None
        if self._role.is_chief:  # whose clock counts
            left_s = None if cause.is_user else cause.at_unix_s - time.time()
            word = json.dumps(left_s)
        left_s = json.loads(self._agreement.from_chief("time left", word))
        return self._keeper.save_before_leaving(logs, left_s)

    def _end(self) -> None:
        while self._undo:
            self._undo.pop()()


def _in_main_thread() -> bool:
    """In which alone Python handles signals, and a `SystemExit` ends the process."""
    return threading.current_thread() is threading.main_thread()
