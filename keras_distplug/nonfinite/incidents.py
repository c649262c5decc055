"""Diagnoses the batches of skipped updates, and saves them."""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import Future, wait

from keras_distplug.callbacks.run_keeper import RunKeeper
from keras_distplug.core.log import announce
from keras_distplug.core.threads import run_in_daemon
from keras_distplug.nonfinite import incident_files
from keras_distplug.nonfinite.diagnosis import Diagnosis, diagnose
from keras_distplug.nonfinite.gate import Fault
from keras_distplug.step.instrumentation import StepInstrumentation
from keras_distplug.storage import layout

_ENDING_S = 60.0


class Incidents:
    """The incidents of one worker in one training job.

    Args:
        instrumentation: The instrumentation of the model.
        keeper: The keeper of the directory to save them in; None without a directory.
        limit: The maximum number of incidents.
    """

    def __init__(
        self, instrumentation: StepInstrumentation, keeper: RunKeeper | None, limit: int
    ) -> None:
        self._instrumentation = instrumentation
        self._keeper = keeper
        self._remaining = limit
        self._writing: list[tuple[str, Future[str]]] = []

    def accepts(self, fault: Fault) -> bool:
        """True if `fault` should be diagnosed and saved, which counts toward the limit."""
        if not self._remaining or fault.batch is None:
            return False
        self._remaining -= 1
        return True

    def diagnosis(self, fault: Fault) -> Diagnosis | None:
        """Recomputes the batch of `fault`; None, with a warning, if that fails."""
        try:
            of_model = self._instrumentation
            return diagnose(of_model.model, fault.batch, of_model.stock["train_step"])
        except Exception as error:  # noqa: BLE001 (the step may be the user's)
            warnings.warn(
                f"The cause of the skipped update of replica {fault.replica} is unknown, because "
                f"its batch could not be recomputed: {type(error).__name__}: {error}",
                stacklevel=2,
            )
            return None

    def save(self, fault: Fault, epoch: int, batch: int, told: str) -> None:
        """Writes the batch of `fault` in a thread.

        Args:
            fault: A fault for which `accepts` returned `True`.
            epoch: The index of the epoch, from 0.
            batch: The index of the batch in the epoch, from 0.
            told: The message about it.
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
        self._writing.append((incident.name, run_in_daemon(write, "keras_distplug-incident")))

    def report_finished(self) -> None:
        """Reports the batches that have been written since the last call."""
        if not self._writing:  # called in every step
            return
        for name, future in [each for each in self._writing if each[1].done()]:
            self._writing.remove((name, future))
            if (error := future.exception()) is not None:
                _warn(name, error)
            else:
                announce(
                    "the batch of the skipped update was saved: inspect it with "
                    f"`keras-distplug replay {future.result()}`"
                )

    def end(self) -> None:
        """Waits for batches that are being written, up to a time limit."""
        wait([future for _, future in self._writing], _ENDING_S)
        self.report_finished()
        for name, _ in self._writing:
            _warn(name, TimeoutError(f"writing took longer than {_ENDING_S:g} s"))
        self._writing.clear()


def _warn(name: str, error: BaseException) -> None:
    warnings.warn(
        f"The batch {name}, whose update was skipped, could not be saved: {error}", stacklevel=2
    )
