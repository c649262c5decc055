"""Weights & Biases."""

from __future__ import annotations

import contextlib
from typing import Any

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.trackers.tracker import (
    Incident,
    Mark,
    Outcome,
    Point,
    Severity,
    TrackedRun,
    prefixed,
    require_package,
)

_OURS = ("id", "resume", "reinit", "settings")
_STEP = "distplug/step"
_LEVELS = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.ERROR: "ERROR"}
# wandb writes its file every 15 s by default: a kill would lose the points of that time.
# Console output is not captured, because that starts here in the middle of a job. At the end
# of the process, wandb waits for both timeouts: for 90 s, and forever, by default.
_SETTINGS = {
    "console": "off",
    "init_timeout": 20.0,
    "finish_timeout": 10.0,
    "x_transaction_log_flush_interval": 1.0,
}


class WandbTracker:
    """Records a training job in one run of Weights & Biases, across all its attempts.

    Pass it to `RunLog`. The run's ID is kept in the folder of the training, so that a script that
    is started again continues the same run.

    Example:

    ```python
    run_log = kd.RunLog(trackers=[kd.WandbTracker(project="mnist")])
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), run_log])
    ```

    - Metrics are logged with `step`, the number of batches trained since the run started. A batch
      that is trained again after a kill is not logged again.
    - Incidents are alerts (`wandb.alert`).
    - A run that is preempted is marked as such; one that ends with an error is marked as failed.
    - W&B writes its file every second: if the process is killed, up to a second of metrics can be
      missing. Without a connection (`mode="offline"`), every attempt has its own folder with the
      same run ID, and `wandb sync` merges them into one run.

    Args:
        project: The project. Defaults to W&B's default: `WANDB_PROJECT`, or `"uncategorized"`.
        run: A run that the script has opened with `wandb.init(id=..., resume="allow")`, for
            example for W&B's own Keras callback. The script ends it. All metrics then have the
            prefix `distplug/`, and are logged over the metric `distplug/step` instead of W&B's own
            step. Defaults to a separate run, which leaves `wandb.run` alone.
        settings: A dict of `wandb.Settings` that override ours: `console="off"`, and in
            seconds `init_timeout=20`, `finish_timeout=10` and
            `x_transaction_log_flush_interval=1`.
        init: Other arguments of `wandb.init`, such as `entity`, `group`, `tags` or `mode`.

    Raises:
        ConfigurationError: If wandb is not installed; for `id`, `resume` or `reinit`; for `run`
            together with other arguments.
    """

    name = "wandb"

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        settings: dict[str, Any] | None = None,
        **init: Any,
    ) -> None:
        require_package("wandb", type(self).__name__, "wandb")
        if reserved := sorted(init.keys() & set(_OURS)):
            raise ConfigurationError(
                f"Expected no argument that {type(self).__name__} sets itself to continue the "
                f"same W&B run after a restart. Received: {', '.join(reserved)}. Omit such "
                "arguments, or call `wandb.init` in the script and pass its result as `run`."
            )
        if run is not None and (project is not None or settings or init):
            raise ConfigurationError(
                "Expected either `run` or arguments for a new run. Received both. Pass the "
                "arguments to the `wandb.init` call that creates `run`."
            )
        self.project = project
        self._given = run
        self._settings = dict(settings or {})
        self._init = dict(init)
        self._run: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.project is None else repr(self.project)})"

    def open(self, run: TrackedRun) -> Mark | None:
        import wandb

        if self._given is not None:
            self._run = self._given
            self._run.define_metric(_STEP)
            self._run.define_metric("distplug/*", step_metric=_STEP)
        else:
            self._run = self._opened(wandb, run)
        self._run.config.update({"distplug": dict(run.details)}, allow_val_change=True)
        return None  # a server may receive the last metrics of a killed process later

    def log(self, point: Point) -> None:
        if self._given is None:
            self._run.log(dict(point.metrics), step=point.step)
        else:
            self._run.log({**prefixed(point.metrics), _STEP: point.step})

    def alert(self, incident: Incident) -> None:
        self._run.alert(
            title=f"keras_distplug: {incident.kind.replace('_', ' ')}"[:63],
            text=incident.text,
            level=_LEVELS[incident.severity],
            wait_duration=1,  # seconds; RunLog limits them
        )

    def close(self, outcome: Outcome) -> None:
        if outcome is Outcome.INTERRUPTED:
            self._run.mark_preempting()
        if self._given is None:
            self._run.finish(exit_code=0 if outcome is Outcome.FINISHED else 1)

    def _opened(self, wandb: Any, run: TrackedRun) -> Any:
        mode = self._init.get("mode") or wandb.setup().settings.mode
        # `wandb.init` would ask on the terminal, from this thread.
        if mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ConfigurationError(
                "W&B has no API key. Run `wandb login`, set WANDB_API_KEY, or use "
                "WandbTracker(mode='offline')."
            )
        known = wandb.Settings.model_fields
        ours = {name: value for name, value in _SETTINGS.items() if name in known}
        try:
            return wandb.init(
                **{"name": run.name, **self._init},
                project=self.project,
                id=run.key,
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(**{**ours, **self._settings}),
            )
        except BaseException:
            # wandb keeps the ID of a run that it could not open, and would refuse it next time.
            if wandb.run is None:
                with contextlib.suppress(Exception):  # as at the end of the process
                    wandb.teardown()
            raise
