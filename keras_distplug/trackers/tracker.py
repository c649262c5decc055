"""The methods of an experiment tracker, and the values that they receive."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from keras_distplug.core.errors import ConfigurationError


class Severity(enum.StrEnum):
    """The severity of an incident."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Outcome(enum.StrEnum):
    """The way an attempt ended."""

    FINISHED = "finished"
    FAILED = "failed"  # with an error
    INTERRUPTED = "interrupted"  # preempted, or another worker was lost: the training resumes


@dataclass(frozen=True)
class TrackedRun:
    """The training that a tracker records.

    Args:
        key: 32 random hexadecimal digits, the same in all attempts of a training job.
        name: A name for people, such as `"mnist/run-0001"`.
        details: The number of workers, versions of packages, and so on, of this attempt.
    """

    key: str
    name: str
    details: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Mark:
    """The newest point of a training job that a tracker has.

    Args:
        step: Batches trained since the run started; -1 before the first point.
        is_epoch_end: True if that includes the logs of the epoch that ends with this step.
    """

    step: int = -1
    is_epoch_end: bool = False


@dataclass(frozen=True)
class Point:
    """Metrics of one step.

    Args:
        step: Batches trained since the run started.
        at: Seconds since 1970. A point that is logged again after a failure has the same time.
        metrics: Values by name.
        is_epoch_end: True if these are the logs of the epoch that ends with this step. A step may
            have two points, one of each kind, whose metrics have different names.
    """

    step: int
    at: float
    metrics: Mapping[str, float]
    is_epoch_end: bool = False


@dataclass(frozen=True)
class Incident:
    """An event that a person should know about.

    Args:
        at: Seconds since 1970.
        kind: The event's name in the log of the run, such as `"hung"`.
        text: Readable description.
        severity: Its severity.
    """

    at: float
    kind: str
    text: str
    severity: Severity = Severity.WARNING


class Tracker(Protocol):
    """A tracker for `RunLog(trackers=[...])`.

    `RunLog` calls these methods on the chief only, from one thread per tracker, so they may wait
    for a server. If one raises an error, the user is informed once, and the call is repeated later.

    Example:

    ```python
    class Printed:
        name = "printed"

        def open(self, run):
            print("run", run.key)
            return None

        def log(self, point):
            print(point.step, dict(point.metrics))

        def alert(self, incident):
            print(incident.severity, incident.text)

        def close(self, outcome):
            print(outcome)

    callbacks = [*kd.defaults("runs/mnist"), kd.RunLog(trackers=[Printed()])]
    ```
    """

    @property
    def name(self) -> str:
        """A lowercase word that no other tracker of the training has: it names a folder."""
        ...

    def open(self, run: TrackedRun) -> Mark | None:
        """Creates the tracker's run, or resumes the one with this key. Called once per attempt.

        Args:
            run: The training that the tracker records.

        Returns:
            How much the tracker's run has, `Mark()` for an empty run, or None if the tracker cannot
            know. With None, `RunLog` notes every point in the folder of the training before the
            tracker receives it.
        """
        ...

    def log(self, point: Point) -> None:
        """Records metrics.

        Over all attempts, steps never decrease, and no metric is logged twice for a step.

        Args:
            point: The metrics of one step.
        """
        ...

    def alert(self, incident: Incident) -> None:
        """Records an incident.

        Args:
            incident: The incident, to be shown to people.
        """
        ...

    def close(self, outcome: Outcome) -> None:
        """Ends this attempt. The process may end a few seconds later.

        Args:
            outcome: How the attempt ended.
        """
        ...


def prefixed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics under names that a callback of the tracker does not use for its own."""
    return {
        name if name.startswith("distplug/") else f"distplug/{name}": value
        for name, value in metrics.items()
    }


def require_package(module: str, tracker: str, package: str) -> None:
    """Checks that a tracker's library is installed, without loading it.

    Raises:
        ConfigurationError: If it is not.
    """
    spec = importlib.util.find_spec(module)
    # A folder named like the library, such as wandb/ with its files, isn't a library.
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            f"{tracker} needs the package {package}, which is not installed. "
            f"Run pip install {package}."
        )
