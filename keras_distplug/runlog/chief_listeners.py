"""The listeners to a chief's events other than the log: TensorBoard's curves and trackers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from keras_distplug.core.events import Began, Entry
from keras_distplug.runlog.event_files import EventFiles
from keras_distplug.runlog.goodput_curves import GoodputCurves
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.log_files import FOLDER, read
from keras_distplug.runlog.tracked_fit import TrackedFit
from keras_distplug.storage.files import Files
from keras_distplug.trackers.tracker import Tracker


def chief_listeners(
    files: Files, folder: str, began: Began, begins_at: float, trackers: Sequence[Tracker]
) -> list[GoodputCurves | TrackedFit]:
    """Returns the listeners, to be closed in this order.

    Args:
        files: The directory of the run.
        folder: The folder of the log, in that directory.
        began: The first event of the `fit`.
        begins_at: The start of its process, in seconds since 1970.
        trackers: The user's trackers.
    """
    tracked = TrackedFit(trackers, files, folder, began) if trackers else None

    def earlier() -> tuple[list[Fit], list[Entry]]:
        fits, supervised = read(files, folder.removesuffix(FOLDER).rstrip("/"))
        before = [fit for fit in fits if fit.began.session != began.session]
        if tracked is not None:
            tracked.on_earlier_attempts(before, supervised, time.time())
        return before, supervised

    curves = GoodputCurves(
        EventFiles(files, f"{folder}/goodput"),
        earlier,
        begins_at,
        resumes=began.resumes,
        on_shares=None if tracked is None else tracked.on_goodput,
    )
    return [curves] if tracked is None else [curves, tracked]
