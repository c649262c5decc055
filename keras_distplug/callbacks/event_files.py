"""TensorBoard's files, on a disk or in a store."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from tensorboard.summary import Writer

from keras_distplug.storage.files import Files, LocalFiles

_FLUSH_SECS = 5.0
_EVERY_SECS, _LONGEST_SECS, _SHARE = 60.0, 600.0, 0.01  # of uploads


class EventFiles:
    """The files of one of TensorBoard's runs. All methods wait for the disk, or the store.

    A store has no appending: there, a file is written here, and comes there when it is complete and
    the next one begins; at the end, the last one does.

    Args:
        files: The directory.
        folder: Of the run, in it.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._here: tempfile.TemporaryDirectory[str] | None = None
        if isinstance(files, LocalFiles):
            self.path = Path(files.where(folder))
        else:
            self._here = tempfile.TemporaryDirectory(prefix="keras_distplug-tensorboard-")
            self.path = Path(self._here.name)
        self._begun_s = self._looked_s = time.monotonic()
        self._writer: Any = None

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if self._writer is None:
            self._writer = Writer(str(self.path))
        self._writer.add_scalar(tag, value, step)

    def look_after(self) -> None:
        """To be called again and again.

        Raises:
            OSError: If a file cannot be written. It is kept, and tried again the next time.
        """
        passed_s = time.monotonic() - self._looked_s
        if self._here is None:
            if passed_s >= _FLUSH_SECS and self._writer is not None:
                self._writer.flush()
                self._looked_s = time.monotonic()
            return
        pause_s = max(_EVERY_SECS, _SHARE * (time.monotonic() - self._begun_s))
        if passed_s >= min(pause_s, _LONGEST_SECS):
            self._looked_s = time.monotonic()
            self._end_file()

    def close(self) -> None:
        """Raises OSError if the last file cannot be written."""
        self._end_file()
        if self._here is not None:
            self._here.cleanup()

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._here is None:
            return
        for path in sorted(self.path.iterdir()):
            there, data = f"{self._folder}/{path.name}", path.read_bytes()
            try:
                self._files.create(there, [data])
            except FileExistsError:
                # It came there the last time, and the answer was lost.
                if self._files.read(there) != data:
                    raise
            path.unlink()
