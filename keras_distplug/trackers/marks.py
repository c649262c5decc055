"""State that survives a kill, so that the next attempt continues a tracker's run.

<directory>/run-0001/log/trackers/wandb/
  3f0c...9a1b.key     the key of the tracker's run
  000000001234.step   the last step that the tracker may have received
"""

from __future__ import annotations

import contextlib
import re
import uuid

from keras_distplug.storage.files import Files
from keras_distplug.trackers.tracker import Mark

_KEY = re.compile(r"(?P<key>[0-9a-f]{32})\.key")
_MARK = re.compile(r"(?P<step>\d{12,})\.(?P<kind>step|epoch)")


class Marks:
    """Files of one tracker, in the folder of the training's log. Methods wait for the storage, and
    raise OSError.

    Args:
        files: The directory.
        folder: In it.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._last: str | None = None

    def key(self) -> str:
        """Returns the key of the tracker's run, which the first attempt draws at random."""
        keys = [match["key"] for name in self._names() if (match := _KEY.fullmatch(name))]
        if keys:
            return keys[0]
        drawn = uuid.uuid4().hex
        self._files.create(f"{self._folder}/{drawn}.key", [b""])
        return drawn

    def last(self) -> Mark:
        """Returns the last point that was marked."""
        found = {
            Mark(int(match["step"]), match["kind"] == "epoch"): name
            for name in self._names()
            if (match := _MARK.fullmatch(name))
        }
        if not found:
            return Mark()
        self._last = found[max(found)]
        return max(found)

    def mark(self, point: Mark) -> None:
        """Notes that the tracker is about to receive this point."""
        name = f"{point.step:012d}.{'epoch' if point.is_epoch_end else 'step'}"
        if name == self._last:
            return
        with contextlib.suppress(FileExistsError):  # created before, and the answer was lost
            self._files.create(f"{self._folder}/{name}", [b""])
        before, self._last = self._last, name
        if before is not None:
            self._files.delete(f"{self._folder}/{before}")

    def _names(self) -> list[str]:
        return self._files.names(self._folder)
