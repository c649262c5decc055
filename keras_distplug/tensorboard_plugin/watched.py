"""A run that the tab shows, updated with every refresh."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_distplug.core import events
from keras_distplug.core.events import Entry
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.log_files import Reader
from keras_distplug.runlog.run_place import delay_secs, find_place
from keras_distplug.runlog.summary import Judged, judged, make_headline, summarize
from keras_distplug.storage import survey
from keras_distplug.storage.files import Files
from keras_distplug.storage.survey import CheckpointState

_LOOK_SECS = 30.0  # between looks at the checkpoints, which may change without a log line
_MOST_NOTES = 20
_LOOK_SHARE = 0.1  # of the time since the last log line: old runs rarely change


@dataclass(frozen=True)
class Answer:
    """A response.

    Args:
        text: JSON.
        version: Differs for different texts.
    """

    text: str
    version: str


def answer(found: Any) -> Answer:
    text = json.dumps(found, allow_nan=False)
    return Answer(text, f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"')


@dataclass(frozen=True)
class _Known:
    """The known data of a run.

    Args:
        at: When they were read, in seconds since 1970.
        fits: The fits of all workers.
        supervised: The supervisors' events.
        checkpoints: The existing checkpoints; None if that is not known.
        surveyed_at: When these were listed, in seconds since 1970.
    """

    at: float
    fits: Sequence[Fit]
    supervised: Sequence[Entry]
    checkpoints: Mapping[int, CheckpointState] | None
    surveyed_at: float

    def is_due(self, now: float) -> bool:
        """True if the checkpoints may have changed without news in the log."""
        heard = max(
            [fit.ends_at for fit in self.fits] + [each.at for each in self.supervised[-1:]],
            default=self.at,
        )
        return now - self.surveyed_at > max(_LOOK_SECS, _LOOK_SHARE * (self.surveyed_at - heard))


class Watched:
    """Caches what the tab shows of a run until there is news.

    Args:
        label: The name of the run on the page.
        files: A folder that contains the run's folder, possibly some levels down.
        path: The path of the run's folder in `files`.
    """

    def __init__(self, label: str, files: Files, path: str) -> None:
        self.label = label
        self._files = files
        self._path = path
        self._notes: deque[str] = deque(maxlen=_MOST_NOTES)  # about skipped lines
        self._reader = Reader(files, path, self._note)
        self._known: _Known | None = None
        self._judged: Judged | None = None
        self._headline: dict[str, Any] | None = None
        self._details: Answer | None = None
        self._updating = threading.Lock()

    def headline(self, now: float) -> dict[str, Any]:
        """Returns `runlog.summary.headline` of the run."""
        with self._updating:
            known = self._update(now)
            if self._headline is None:
                self._headline = make_headline(self.label, self._judge(known))
                answer(self._headline)  # what JSON cannot express stays out of the other runs
            return self._headline

    def details(self, now: float) -> Answer:
        """Returns `runlog.summary.summary` of the run."""
        with self._updating:
            known = self._update(now)
            if self._details is None:
                notes = list(self._notes)
                shown = summarize(self.label, known.fits, self._judge(known))
                self._details = answer({**shown, "notes": notes})
            return self._details

    # How

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)
            self._details = None

    def _judge(self, known: _Known) -> Judged:
        if self._judged is None:
            self._judged = judged(
                known.fits,
                known.supervised,
                known.at,
                known.checkpoints,
                find_place(self._files, self._path),
                delay_secs(self._files),
            )
        return self._judged

    def _update(self, now: float) -> _Known:
        fits, supervised = self._reader.read()
        known = self._known
        # Without news, the reader returns the same objects.
        is_same = known is not None and (known.fits, known.supervised) == (fits, supervised)
        is_due = known is None or known.is_due(now)
        until = math.inf if self._judged is None else self._judged.verdict.until
        if known is not None and is_same and not is_due and now < until:
            return known
        if known is not None and not is_due and _saves(fits) == _saves(known.fits):
            checkpoints, surveyed_at = known.checkpoints, known.surveyed_at
        else:
            checkpoints, surveyed_at = survey.checkpoint_states(self._files, self._path), now
        self._known = _Known(now, fits, supervised, checkpoints, surveyed_at)
        self._judged = self._headline = self._details = None
        return self._known


def _saves(fits: Sequence[Fit]) -> int:
    return sum(isinstance(entry.event, events.Saved) for fit in fits for entry in fit.entries)
