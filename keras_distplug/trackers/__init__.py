"""Experiment trackers: one run of theirs for all attempts of a training job.

Public for authors of trackers: `Tracker`, the methods that `RunLog(trackers=[...])` calls,
and the values that these receive.
"""

from keras_distplug.trackers.tracker import (
    Incident,
    Mark,
    Outcome,
    Point,
    Severity,
    TrackedRun,
    Tracker,
)

__all__ = ["Incident", "Mark", "Outcome", "Point", "Severity", "TrackedRun", "Tracker"]
