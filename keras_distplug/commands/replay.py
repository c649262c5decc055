"""`keras-distplug replay`: is a batch whose update was left out finite by now, and where not?"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from keras_distplug.commands import modules, tables
from keras_distplug.nonfinite import incident_files
from keras_distplug.nonfinite.incident_files import Incident
from keras_distplug.storage import architecture, survey
from keras_distplug.storage.files import open_files
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.survey import Seen, SeenRun


def run(parsed: argparse.Namespace) -> int:
    files = open_files(parsed.directory, parsed.storage_options)
    incident, batch = incident_files.read(files, parsed.incident)
    seen = survey.the_run(files, parsed.run or incident.run)
    chosen = survey.choose(files, seen, _step_before(seen, incident, parsed.step))
    stored = CheckpointStore(files, seen.name).read(chosen.name)
    made = architecture.recall(files, seen.name, stored.manifest.cursor.step)
    modules.load_for(made.model, stored, parsed.modules)

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
        tables.say(f"{files.where(incident.path)}, as it was met: {incident.told}")
        what = "all is finite" if found.is_finite else f"it begins with {found.origin}"
        loss = "" if found.loss is None else f" (loss {found.loss:.4g})"
        tables.say(f"with the values of {seen.name}/{chosen.name}: {what}{loss}")
    return 0 if found.is_finite else 1


def _step_before(run: SeenRun, incident: Incident, asked: int | str | None) -> int | str | None:
    """The newest checkpoint from before the incident; the oldest if there is none such any more."""
    committed = run.committed()
    if asked is not None or run.name != incident.run or not committed:
        return asked
    before = [each for each in committed if _position(each) <= (incident.epoch, incident.batch)]
    return before[-1].name if before else committed[0].name


def _position(seen: Seen) -> tuple[int, int]:
    cursor = seen.whole.cursor
    return cursor.epoch, cursor.batch
