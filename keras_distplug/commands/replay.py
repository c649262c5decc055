"""`keras-distplug replay`: recomputes a batch whose update was skipped."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from keras_distplug.commands import locations, modules, tables
from keras_distplug.nonfinite import incident_files
from keras_distplug.nonfinite.incident_files import Incident
from keras_distplug.storage import architecture, survey
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.survey import SurveyedCheckpoint, SurveyedRun


def run(parsed: argparse.Namespace) -> int:
    location = locations.of(parsed, needs_run=False)
    files = location.files
    asked = (parsed.incident or location.incident or "").rpartition("/")[2]
    incident, batch = incident_files.read(files, asked or None)
    seen = survey.find_run(files, location.run or incident.run)
    chosen = survey.choose(files, seen, _step_before(seen, incident, location.checkpoint))
    stored = CheckpointStore(files, seen.name).read(chosen.name)
    made = architecture.recall(files, seen.name, stored.manifest.cursor.step)
    modules.load_needed(made.model, stored, parsed.modules)

    from keras_distplug.checkpoint.model_export import rebuilt
    from keras_distplug.nonfinite.diagnosis import diagnose

    with rebuilt(made.model, stored.manifest, stored.values) as model:
        found = diagnose(model, batch)
    if parsed.json:
        tables.say_json(
            {
                "directory": files.where(),
                "incident": {"file": incident.name, **asdict(incident)},
                "run": seen.name,
                "checkpoint": chosen.name,
                "is_finite": found.is_finite,
                "loss": None if found.loss is None else repr(found.loss),
                "origin": found.origin,
                "variables": found.variables,
            }
        )
    else:
        tables.say(f"{files.where(incident.path)}, as reported during training: {incident.told}")
        what = (
            "all values are finite"
            if found.is_finite
            else f"NaN or Inf first appears in {found.origin}"
        )
        loss = "" if found.loss is None else f" (loss {found.loss:.4g})"
        tables.say(f"recomputed with the values of {seen.name}/{chosen.name}: {what}{loss}")
    return 0 if found.is_finite else 1


def _step_before(run: SurveyedRun, incident: Incident, asked: int | str | None) -> int | str | None:
    """Returns the newest checkpoint from before the incident, or else the oldest one."""
    committed = run.committed()
    if asked is not None or run.name != incident.run or not committed:
        return asked
    before = [each for each in committed if _position(each) <= (incident.epoch, incident.batch)]
    return before[-1].name if before else committed[0].name


def _position(seen: SurveyedCheckpoint) -> tuple[int, int]:
    cursor = seen.whole.cursor
    return cursor.epoch, cursor.batch
