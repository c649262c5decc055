"""TensorBoard curves of replicas' and workers' metrics."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from keras_distplug.runlog.custom_charts import write_layout
from keras_distplug.runlog.event_files import EventFiles
from keras_distplug.step.step_reports import ReplicaReport, StepReport
from keras_distplug.storage.files import Files

_MOST_RUNS = 64

OF_REPLICAS: Mapping[str, Callable[[ReplicaReport, StepReport], float | None]] = {
    "loss": lambda replica, worker: replica.loss,
    "gradient_norm": lambda replica, worker: replica.gradient_norm,
    "samples_per_s": lambda replica, worker: (
        None if replica.samples is None else replica.samples / worker.step_s
    ),
    "compute_ms": lambda replica, worker: 1000 * replica.compute_s,
    "sync_ms": lambda replica, worker: None if replica.sync_s is None else 1000 * replica.sync_s,
}
OF_WORKERS: Mapping[str, Callable[[StepReport], float | None]] = {
    "step_ms": lambda worker: 1000 * worker.step_s,
    "input_ms": lambda worker: None if worker.input_s is None else 1000 * worker.input_s,
    "memory_mb": lambda worker: None if worker.memory_bytes is None else worker.memory_bytes / 1e6,
}
SPREAD: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "median": statistics.median,
    "p95": lambda values: float(np.percentile(values, 95)),
    "max": max,
    "spread": lambda values: max(values) - min(values),
}
_CURVES = ("min", "median", "p95", "max")


class ReplicaCurves:
    """Writes one chart per metric, with one TensorBoard run per replica or worker.

    Args:
        files: The folder for all runs; None writes nothing.
    """

    def __init__(self, files: Files | None) -> None:
        self._files = files
        self._runs: dict[str, EventFiles] = {}
        self._shown: set[str] = set()  # in TensorBoard's "Custom Scalars"

    def add(self, reports: Sequence[StepReport]) -> None:
        """Adds the values of one window.

        Raises:
            OSError: If a file cannot be written. If it is in a store, it is kept and the write is
                retried later.
        """
        if self._files is None:
            return
        step = reports[0].step
        known = get_values(reports)
        new = {name for name, values in known.items() if values} - self._shown
        for name, values in known.items():
            kind = "replica" if name in OF_REPLICAS else "worker"
            if len(values) <= _MOST_RUNS:
                for number, value in values:
                    self._add(self._files, f"{kind}-{number}", name, value, step)
            if len(values) > 1:
                for how in _CURVES:
                    spread = SPREAD[how]([value for _, value in values])
                    self._add(self._files, how, name, spread, step)
        if new and self._runs:
            # TensorBoard merges the layouts of all runs, and reads one of every layout.
            charts = {name: f"distplug/{name}" for name in sorted(self._shown | new)}
            write_layout(next(iter(self._runs.values())), "Distplug: replicas and workers", charts)
            self._shown |= new
        for run in self._runs.values():
            run.flush_if_due()

    def close(self) -> None:
        """Closes all files; raises OSError if one cannot be written."""
        runs, self._runs = self._runs, {}
        with contextlib.ExitStack() as stack:  # closes every run, even if one fails
            for run in runs.values():
                stack.callback(run.close)

    def _add(self, files: Files, run: str, name: str, value: float, step: int) -> None:
        if run not in self._runs:
            self._runs[run] = EventFiles(files, run)
        self._runs[run].add_scalar(f"distplug/{name}", value, step)


def get_values(reports: Sequence[StepReport]) -> dict[str, list[tuple[int, float]]]:
    """Returns the known values of every metric, with the number of the replica or worker."""
    replicas = [(each, worker) for worker in reports for each in worker.replicas]
    found = {
        name: [(each.replica, value(each, worker)) for each, worker in replicas]
        for name, value in OF_REPLICAS.items()
    }
    for name, of_worker in OF_WORKERS.items():
        found[name] = [(worker.worker, of_worker(worker)) for worker in reports]
    return {
        name: [(number, value) for number, value in each if value is not None]
        for name, each in found.items()
    }
