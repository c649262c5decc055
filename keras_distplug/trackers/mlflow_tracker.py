"""MLflow."""

from __future__ import annotations

import datetime
import os
import re
from typing import Any

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.trackers.tracker import (
    Incident,
    Mark,
    Outcome,
    Point,
    TrackedRun,
    prefixed,
    require_package,
)

_KEY, _INCIDENTS = "keras_distplug.run", "keras_distplug.incidents"
_STEP, _EPOCH_END = "distplug/step", "distplug/epoch_end_step"
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
_MOST_CHARACTERS = 5_000  # of a tag
_STATUS = {Outcome.FINISHED: "FINISHED", Outcome.FAILED: "FAILED", Outcome.INTERRUPTED: "KILLED"}


class MlflowTracker:
    """Records a training job in one run of MLflow, across all its attempts.

    Pass it to `RunLog`. A script that is started again finds the run by its tag
    `keras_distplug.run`, whose value is kept in the folder of the training.

    Example:

    ```python
    run_log = kd.RunLog(trackers=[kd.MlflowTracker("mnist")])
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), run_log])
    ```

    - Metrics are logged with `step`, the number of batches trained since the run started. A batch
      that is trained again after a kill is not logged again: the run itself holds the last step, as
      the metrics `distplug/step` and `distplug/epoch_end_step`.
    - Incidents are lines of the tag `keras_distplug.incidents`; the tags
      `keras_distplug.<detail>` have the workers, versions and so on of the last attempt.
    - The run's status is `FINISHED`, `FAILED` after an error, or `KILLED` if it was interrupted and
      resumes; it stays `RUNNING` if the process is killed.
    - The run is not MLflow's active run. For `mlflow.log_param` and MLflow's own callbacks in the
      same run, open it in the script and pass its ID as `run_id`.

    Args:
        experiment: Name of the experiment, created if it does not exist. Defaults to
            `MLFLOW_EXPERIMENT_NAME`, or `"Default"`.
        tracking_uri: Defaults to `mlflow.set_tracking_uri`'s, or `MLFLOW_TRACKING_URI`.
        run_id: A run that the script has opened, the same one in all attempts, for example for
            MLflow's own Keras callback. Its status is left to the script, and all metrics have the
            prefix `distplug/`. Defaults to a separate run.
        run_name: Defaults to the folder's name.
        tags: A dict of tags for a new run.

    Raises:
        ConfigurationError: If MLflow is not installed; for `run_id` together with `experiment`,
            `run_name` or `tags`.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        require_package("mlflow", type(self).__name__, "mlflow-skinny")
        if run_id is not None and (experiment is not None or run_name is not None or tags):
            raise ConfigurationError(
                "Expected either the `run_id` of an existing run, or `experiment`, `run_name` and "
                "`tags` for a new one. Received both. Omit `run_id`, or set the others where the "
                "script opens that run."
            )
        self.experiment = experiment
        self._tracking_uri = tracking_uri
        self._given_id = run_id
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._incidents: list[str] = []
        self._client: Any = None
        self._id = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.experiment is None else repr(self.experiment)})"

    def open(self, run: TrackedRun) -> Mark | None:
        from mlflow import MlflowClient

        self._client = MlflowClient(self._tracking_uri)
        self._id = self._given_id or self._found(run) or self._created(run)
        if self._given_id is None:
            self._client.update_run(self._id, status="RUNNING")
        for name, value in run.details.items():
            self._client.set_tag(self._id, f"keras_distplug.{name}", str(value))
        data = self._client.get_run(self._id).data
        self._incidents = data.tags.get(_INCIDENTS, "").splitlines()
        step, epoch_end = (int(data.metrics.get(name, -1)) for name in (_STEP, _EPOCH_END))
        return max(Mark(step), Mark(epoch_end, is_epoch_end=epoch_end >= 0))

    def log(self, point: Point) -> None:
        from mlflow.entities import Metric

        at_ms = round(1000 * point.at)
        # The step comes first, for a store that does not write all of them at once.
        found = point.metrics if self._given_id is None else prefixed(point.metrics)
        metrics = {_EPOCH_END if point.is_epoch_end else _STEP: float(point.step), **found}
        self._client.log_batch(
            self._id,
            [
                Metric(_NOT_ALLOWED.sub("_", name), value, at_ms, point.step)
                for name, value in metrics.items()
            ],
        )

    def alert(self, incident: Incident) -> None:
        at = datetime.datetime.fromtimestamp(incident.at, datetime.UTC)
        text = " ".join(incident.text.split())
        line = f"{at:%Y-%m-%dT%H:%M:%SZ} {incident.severity} {incident.kind}: {text}"
        line = line[:_MOST_CHARACTERS]
        if line not in self._incidents:  # a repeated call
            self._incidents.append(line)
        while len("\n".join(self._incidents)) > _MOST_CHARACTERS:
            del self._incidents[0]
        self._client.set_tag(self._id, _INCIDENTS, "\n".join(self._incidents))

    def close(self, outcome: Outcome) -> None:
        if self._given_id is None:
            self._client.set_terminated(self._id, status=_STATUS[outcome])

    def _found(self, run: TrackedRun) -> str | None:
        experiment = self._client.get_experiment_by_name(self._experiment_name())
        if experiment is None:
            return None
        found = self._client.search_runs(
            [experiment.experiment_id], f"tags.`{_KEY}` = '{run.key}'", max_results=1
        )
        return str(found[0].info.run_id) if found else None

    def _created(self, run: TrackedRun) -> str:
        name = self._experiment_name()
        experiment = self._client.get_experiment_by_name(name)
        number = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        tags = {**self._tags, _KEY: run.key}
        made = self._client.create_run(number, tags=tags, run_name=self._run_name or run.name)
        return str(made.info.run_id)

    def _experiment_name(self) -> str:
        return self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
