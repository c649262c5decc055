"""The place of a run, and the delay of its log."""

from __future__ import annotations

from keras_distplug.runlog.incident_groups import Place
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files

_UPLOAD_SECS = 70.0  # the longest time between two uploads of a log, and some for the upload


def find_place(files: Files, path: str) -> Place:
    """Returns the directory that the training was given, and the run's name.

    Args:
        files: A folder that holds the run's folder, some levels down perhaps, or is that folder.
        path: The run's folder, from there.
    """
    where = files.where(path).rstrip("/")
    directory, _, name = where.rpartition("/")
    if directory and layout.is_run(name):
        return Place(directory, name)
    return Place(where)


def delay_secs(files: Files) -> float:
    """Returns how much later than written a line can be read."""
    return 0.0 if files.traits.is_near else _UPLOAD_SECS
