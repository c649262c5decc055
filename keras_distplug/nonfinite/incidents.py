"""Looks into batches whose update was left out, and keeps them."""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import Future, wait

from keras_distplug.callbacks.run_keeper import RunKeeper
from keras_distplug.core.log import announce
from keras_distplug.core.threads import in_daemon
from keras_distplug.nonfinite import incident_files
from keras_distplug.nonfinite.diagnosis import Diagnosis, diagnose
from keras_distplug.nonfinite.gate import Fault
from keras_distplug.step.instrumentation import StepInstrumentation
from keras_distplug.storage import layout

_ENDING_S = 60.0


class Incidents:
    """Those of one worker, in one training.

    Args:
        instrumentation: That of the model.
        keeper: Whose directory they are kept in; None where there is none.
        limit: So many are looked into.
    """

    def __init__(
        self, instrumentation: StepInstrumentation, keeper: RunKeeper | None, limit: int
    ) -> None:
        self._instrumentation = instrumentation
        self._keeper = keeper
        self._left = limit
        self._writing: list[tuple[str, Future[str]]] = []

    def takes(self, fault: Fault) -> bool:
        """Whether `fault` is one that is looked into."""
        if not self._left or fault.batch is None:
            return False
        self._left -= 1
        return True

    def diagnosis(self, fault: Fault) -> Diagnosis | None:
        """What its batch gives once more; None, with a warning, if that cannot be computed."""
        try:
            of_model = self._instrumentation
            return diagnose(of_model.model, fault.batch, of_model.stock["train_step"])
        except Exception as error:  # noqa: BLE001 (the step may be the user's)
            warnings.warn(
                f"The batch of replica {fault.replica}, whose update was left out, could not be "
                f"computed once more: {type(error).__name__}: {error}",
                stacklevel=2,
            )
            return None

    def keep(self, fault: Fault, epoch: int, batch: int, told: str) -> None:
        """Writes the batch of `fault` in a thread.

        Args:
            fault: One that `takes` has said yes to.
            epoch: Counted from 0.
            batch: In the epoch, counted from 0.
            told: What is said of it.
        """
        if self._keeper is None:
            return
        incident = incident_files.Incident(
            self._keeper.context.name, epoch, batch, fault.replica, told, layout.now()
        )
        try:
            parts = incident_files.encode(incident, fault.batch)
        except TypeError as error:
            _warn(incident.name, error)
            return
        write = functools.partial(self._keeper.keep_file, incident.path, parts)
        self._writing.append((incident.name, in_daemon(write, "keras_distplug-incident")))

    def look_after(self) -> None:
        """Says what has become of those that were written."""
        if not self._writing:  # in every step
            return
        for name, future in [each for each in self._writing if each[1].done()]:
            self._writing.remove((name, future))
            if (error := future.exception()) is not None:
                _warn(name, error)
            else:
                announce(f"the batch is kept in {future.result()}; `keras-distplug replay` it")

    def end(self) -> None:
        """Waits for those that are being written, but not for ever."""
        wait([future for _, future in self._writing], _ENDING_S)
        self.look_after()
        for name, _ in self._writing:
            _warn(name, TimeoutError(f"it is not written after {_ENDING_S:g} s"))
        self._writing.clear()


def _warn(name: str, error: BaseException) -> None:
    warnings.warn(
        f"The batch {name}, whose update was left out, could not be kept: {error}", stacklevel=2
    )
