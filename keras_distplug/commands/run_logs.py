"""Which logs `goodput` and `report` read."""

from __future__ import annotations

import argparse

from keras_distplug.commands import locations
from keras_distplug.commands.locations import Location
from keras_distplug.core.errors import NoCheckpointError
from keras_distplug.runlog import log_files
from keras_distplug.storage import layout


def names(location: Location, parsed: argparse.Namespace) -> list[str]:
    """Returns the folders of all selected runs that have a log, from the location's directory.

    If the directory holds no run itself but several trainings, these are the runs of all of them.

    Raises:
        NoCheckpointError: If the run has no log.
        CheckpointError: If the directory cannot be listed.
    """
    files = location.files
    try:
        return log_files.runs(files, location.run)
    except NoCheckpointError:
        if location.run is not None or layout.runs(files):
            raise
        of_all = [
            f"{training}/{run}"
            for training in locations.trainings(files)
            for run in layout.names(files, training)
            if layout.is_run(run)
        ]
        found = [name for name in of_all if log_files.FOLDER in layout.names(files, name)]
        if found:
            return found
        if of_all:
            raise
        raise locations.no_run(parsed.directory, parsed.storage_options, files) from None
