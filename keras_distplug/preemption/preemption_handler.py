"""Saves a checkpoint and exits when the machine is about to be preempted."""

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
from keras_distplug.preemption.stopping import Cause, CollectiveStop, Stop
from keras_distplug.preemption.tf_preemption import TfPreemptionNotice

_EXIT_BARRIER_S = 60.0  # for other workers, whose save may have failed differently
_SIGNALS = operating_system.signals("SIGTERM", "SIGUSR1", "SIGUSR2")


class PreemptionHandler(Watchdog):
    """Saves a checkpoint and ends training when the process is preempted.

    A preemption is announced by a signal (Kubernetes and Slurm send SIGTERM, `sbatch
    --signal=USR1@120` sends SIGUSR1, Ctrl-C sends SIGINT) or by the metadata server of AWS, Google
    Cloud or Azure, which the callback polls on their machines. Signals are noticed within
    milliseconds, even while training waits for another worker. Whichever worker is notified, all
    workers agree on a step, save after it, and exit with code 143, for which schedulers restart
    the job. When restarted, the script resumes with the next batch.

    Example:

    ```python
    longer = kd.PreemptionHandler(grace_secs=120)
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), longer])
    ```

    - It is one of `defaults()`; adding your own instance replaces that one.
    - The first Ctrl-C saves and raises `KeyboardInterrupt`, after which `keras-distplug run` does
      not restart the job; the second one exits immediately.
    - With several workers, training also stops for a SIGTERM that TensorFlow receives, such as one
      before `fit`.
    - A running validation is finished first.
    - The script's own signal handlers are called after the checkpoint, and are reinstalled after
      `fit`. A signal that comes too late to stop training is sent again after training.
    - The process exits inside `fit`, so `on_train_end` of other callbacks is not called.
    - Python receives signals in the main thread only. If `fit` is called in another thread, several
      workers still stop for a SIGTERM, because TensorFlow reports it; a single one does not.

    Args:
        signals: Signals that announce a preemption. Defaults to SIGTERM, SIGUSR1 and SIGUSR2, if
            the system has them. Signals that the process ignores remain ignored.
        grace_secs: Time between a signal and the end of the machine, in seconds. A checkpoint that
            would take longer than the remaining time is not started; the local one or the
            previous one is then the newest. Defaults to 30, as in Kubernetes.
        exit: `True` exits with code 143, `False` raises `Preempted` from `fit`. Defaults to `True`,
            except in interactive Python and if `fit` is not called in the main thread, as in Ray
            Train, which restarts the workers after an error.
        cloud: `True` polls the metadata server of this machine's cloud. Defaults to `True`. **Not
            verified on a machine of any cloud.**
        requeue: `True` requeues a Slurm job with `scontrol requeue` after the checkpoint, except
            for Ctrl-C and `scancel`. The job must allow it (`sbatch --requeue`). A failure is
            logged, and training ends as without `requeue`. Defaults to `False`. Tested with Slurm
            22.05, with two nodes on one machine.

    Raises:
        ConfigurationError: If an argument is invalid, such as `requeue=True` outside a Slurm job
            or without `scontrol` on PATH; in `fit`, if `keras_distplug.BackupAndRestore` is not
            among the callbacks.
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
                "Expected `signals` not to contain SIGKILL or SIGSTOP, which cannot be handled, "
                "nor SIGINT, which is always handled. Received: signals="
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

    # Keras' hooks, in the order of their calls

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        others = callback_list.move_to_end(self)
        keeper = keeper_among(others)
        if keeper is None:
            raise ConfigurationError(
                "Expected a keras_distplug.BackupAndRestore among the callbacks, because "
                "PreemptionHandler saves with it. Received: "
                f"{', '.join(type(each).__name__ for each in others) or 'no other callbacks'}. Add "
                "one, or pass the callbacks that `keras_distplug.defaults()` returns."
            )
        self._end()
        if self.defers_to_other(others):
            return
        self._keeper = keeper
        self._role = agreement.get_role(self.model.distribute_strategy)
        self._agreement = agreement.get_channel(self._role)
        self._where = f"{self._role.name} on {socket.gethostname()}"
        self._received = []
        self._fit = callback_list.Calling.now()
        self._stop = Stop()
        if self._role.world_size > 1:
            self._stop = together = CollectiveStop(self._agreement.session("stop"), self._on_lost)
            self._undo.append(together.close)
            if self._role.is_chief:
                notice = TfPreemptionNotice(ServiceKeyValues(), self._on_tf_notice)
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
        # Until all workers are here, another one may still ask for a step to stop at.
        self._agreement.barrier("end of training")
        self._end()
        # A signal that came too late to stop training must not be lost: the script's own handler,
        # or the default one, usually ends the process.
        for number in self._received:
            signal.raise_signal(number)

    # Implementation

    def _watch_signals(self) -> SignalWatch | None:
        if not _in_main_thread():
            if self._role.is_chief:
                which = "signals" if self._role.world_size == 1 else "signals except SIGTERM"
                announce(
                    f"no checkpoint is saved on {which}, because `fit` is not called in the main "
                    "thread, the only one in which PreemptionHandler can handle them"
                )
            return None
        watch = SignalWatch((*self.signals, signal.SIGINT), self._on_signal, self._is_in_fit)
        watch.install()
        self._undo.append(watch.remove)
        return watch

    def _is_in_fit(self, frame: FrameType | None) -> bool:
        """Returns False if an exception has ended `fit`."""
        return self._fit is not None and self._fit.is_above(frame)

    def _on_signal(self, number: int) -> None:
        """Handles a signal. Called from a thread."""
        self._received.append(number)
        is_user = number == signal.SIGINT
        if is_user:
            if self._received.count(number) > 1:
                self._exit_immediately()
                return
            announce(
                "Ctrl-C: stopping after the current batch or validation, and saving a checkpoint; "
                "press Ctrl-C again to exit immediately"
            )
        at_unix_s = time.time() + self.grace_secs
        self._stop.request(Cause(signal.Signals(number).name, self._where, at_unix_s, is_user))

    def _exit_immediately(self) -> None:
        if self._role.world_size > 1:
            # The main thread may wait for another worker forever.
            os._exit(ExitCode.INTERRUPTED)
        if self._watch is not None:
            self._watch.run_previous_handler(signal.SIGINT)

    def _on_notice(self, notice: Notice) -> None:
        """Handles a notice of the cloud. Called from a thread."""
        what = f"{notice.source} notice of {notice.announced}"
        if not notice.is_final:
            announce(f"{what} to {self._where}; training continues")
            return
        at_unix_s = notice.at_unix_s or time.time() + self.grace_secs
        self._stop.request(Cause(what, self._where, at_unix_s))

    def _on_tf_notice(self, worker: str) -> None:
        """Handles a notice of TensorFlow. Called from a thread."""
        what, at_unix_s = "TensorFlow's preemption notice", time.time() + self.grace_secs
        self._stop.request(Cause(what, worker, at_unix_s))

    def _on_lost(self, error: AgreementError) -> None:
        """Logs a failure to agree. Called from a thread."""
        if isinstance(error.__cause__, ConnectionError):
            return  # a lost worker ends `fit` with its own error
        announce(
            "training continues, but a preemption may end it without saving a checkpoint, because "
            f"the workers cannot exchange messages: {error}"
        )

    def _leave(self, cause: Cause, logs: Mapping[str, Any] | None) -> None:
        notice = f"{cause.what} to {cause.worker}"
        problem, saved, is_together = "no checkpoint could be saved", None, False
        try:
            saved = self._save(cause, logs)
            problem = "the workers could not wait for each other before exiting"
            self._agreement.barrier("leaving", _EXIT_BARRIER_S)
            is_together = True
        except DistplugError as error:
            announce(f"{notice}: {problem}: {error}")
        what = "no new checkpoint" if saved is None else f"the checkpoint of step {saved}"
        report(PreemptedEvent(cause.what, cause.worker, cause.is_user, saved))
        if self._role.is_chief:
            announce(
                f"{notice}: training ends with {what}; the next `fit` resumes from the newest "
                "checkpoint, if there is one"
            )
        if saved is not None and (supervised := Supervised.from_env()) is not None:
            supervised.report(self._role.name, Phase.PREEMPTED)
        # Requeuing makes Slurm signal this process again, which must not end it before the
        # request is complete.
        if self._requeue is not None and not cause.is_user:
            self._requeue_job(self._requeue, others_wait=is_together and saved is not None)
        earlier = [(n, self._watch.previous_handler(n)) for n in self._received if self._watch]
        self._end()
        for number, handler in earlier:
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, None)
        if cause.is_user or signal.SIGINT in self._received:
            raise KeyboardInterrupt
        if self.exit or (self.exit is None and not is_interactive() and _in_main_thread()):
            if self._role.cluster:
                leaving.set_exit_code(ExitCode.PREEMPTED)
            sys.exit(ExitCode.PREEMPTED)
        raise Preempted(
            f"{notice}. Training has ended with {what}. To resume, call `fit` again or restart the "
            "script."
        )

    def _requeue_job(self, requeue: Requeue, *, others_wait: bool) -> None:
        if self._role.is_chief and signal.SIGINT not in self._received:
            announce(requeue.ask())
        if others_wait:
            # With `srun --kill-on-bad-exit`, the first exit kills all tasks, including the chief.
            with contextlib.suppress(AgreementError):
                self._agreement.barrier("queue")

    def _save(self, cause: Cause, logs: Mapping[str, Any] | None) -> int | None:
        """Saves if there is time. Returns the step of this `fit`'s newest checkpoint, if any."""
        payload = None
        if self._role.is_chief:  # its clock is used for all workers
            left_s = None if cause.is_user else cause.at_unix_s - time.time()
            payload = json.dumps(left_s)
        left_s = json.loads(self._agreement.broadcast("time left", payload))
        return self._keeper.save_before_leaving(logs, left_s)

    def _end(self) -> None:
        while self._undo:
            self._undo.pop()()


def _in_main_thread() -> bool:
    """Returns True in the main thread.

    Only there does Python handle signals, and does a `SystemExit` end the process.
    """
    return threading.current_thread() is threading.main_thread()
