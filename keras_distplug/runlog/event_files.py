"""TensorBoard's event files, on a disk or in a store."""

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
    """The event files of one of TensorBoard's runs. All methods wait for the disk or the store.

    Files in a store cannot be appended to: a file is written to a temporary folder, and uploaded
    once it is complete. The last one is uploaded by `close`.

    Args:
        files: The directory.
        folder: The run's folder in the directory.
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
        """Adds Markdown to TensorBoard's "Text" dashboard."""
        metadata = texts.create_summary_metadata(display_name="", description="")
        self._add(tag, metadata, text, step, at)

    def add_alone(self, tag: str, metadata: summary_pb2.SummaryMetadata, value: Any) -> None:
        """Adds a value in a separate file, which is complete before the next one starts."""
        self._end_file()
        self._add(tag, metadata, value, 0, time.time())
        self._end_file()

    def flush_if_due(self) -> None:
        """Flushes or uploads the files if it is time to; call it regularly.

        Raises:
            OSError: If a file cannot be written. It is kept, and the next call tries again.
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
        """Closes the last file.

        Raises:
            OSError: If it cannot be written.
        """
        self._upload()
        if self._here is not None:
            self._here.cleanup()

    def _add(
        self, tag: str, metadata: summary_pb2.SummaryMetadata, value: Any, step: int, at: float
    ) -> None:
        if self._writer is None:
            # TensorFlow would create folders without the umask.
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
        """Closes the file, and uploads it to a store."""
        self._end_file()
        if self._here is None:
            return
        for path in sorted(self.path.iterdir()):
            there, data = f"{self._folder}/{path.name}", path.read_bytes()
            try:
                self._files.create(there, [data])
            except FileExistsError:
                # The previous upload succeeded, and its answer was lost.
                if self._files.read(there) != data:
                    raise
            path.unlink()
