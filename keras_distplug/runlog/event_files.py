"""TensorBoard's files, on a disk or in a store."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.scalar import metadata as scalars
from tensorboard.plugins.text import metadata as texts
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from keras_distplug.runlog.sinks import UploadPace
from keras_distplug.storage.files import Files
from keras_distplug.storage.stores.local import LocalFiles

_FLUSH_SECS = 5.0


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
        self._pace = UploadPace(60.0, 600.0)
        self._looked_s = time.monotonic()
        self._writer: Any = None

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        metadata = scalars.create_summary_metadata(display_name="", description="")
        self._add(tag, metadata, np.float32(value), step, time.time())

    def add_text(self, tag: str, text: str, step: int, at: float) -> None:
        """In Markdown, for TensorBoard's tab "Text"."""
        metadata = texts.create_summary_metadata(display_name="", description="")
        self._add(tag, metadata, text, step, at)

    def add_alone(self, tag: str, metadata: summary_pb2.SummaryMetadata, value: Any) -> None:
        """In a file that is whole before the next one begins."""
        self._end_file()
        self._add(tag, metadata, value, 0, time.time())
        self._end_file()

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
        if passed_s >= self._pace.every_secs:
            self._looked_s = time.monotonic()
            self._upload()

    def close(self) -> None:
        """Raises OSError if the last file cannot be written."""
        self._upload()
        if self._here is not None:
            self._here.cleanup()

    def _add(
        self, tag: str, metadata: summary_pb2.SummaryMetadata, value: Any, step: int, at: float
    ) -> None:
        if self._writer is None:
            # TensorFlow's own way to make folders ignores the umask.
            if isinstance(self._files, LocalFiles):
                self._files.inside(f"{self._folder}/events")
            self.path.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self.path))
        tensor = tensor_util.make_tensor_proto(value)
        told = summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        summary = summary_pb2.Summary(value=[told])
        self._writer.add_event(event_pb2.Event(wall_time=at, step=step, summary=summary))

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _upload(self) -> None:
        """Ends the file; in a store, it comes there."""
        self._end_file()
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
