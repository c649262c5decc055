"""TensorBoard's event files in a store."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.curves import curves_in
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from tensorboard.util import tensor_util

from keras_distplug.replicas.replica_curves import ReplicaCurves
from keras_distplug.runlog.event_files import EventFiles
from keras_distplug.step.step_reports import StepReport
from keras_distplug.storage.files import open_files
from keras_distplug.storage.stores.object_store import MemoryStore
from keras_distplug.storage.stores.remote import RemoteFiles


class Trouble(RemoteFiles):
    """A store in which the next requests to create a file fail.

    Args:
        lost: The number of further requests that succeed, but whose reply is lost.
        failing: The number of further requests that fail without any effect.
    """

    def __init__(self, url: str, *, lost: int = 0, failing: int = 0) -> None:
        super().__init__(MemoryStore(), url, {})
        self.lost, self.failing, self.met = lost, failing, 0

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        if self.failing:
            self.failing, self.met = self.failing - 1, self.met + 1
            raise TimeoutError("no answer")
        super().create(path, parts)
        if self.lost:
            self.lost, self.met = self.lost - 1, self.met + 1
            raise TimeoutError("no answer")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads at every flush, so that files in the store are always up to date."""
    monkeypatch.setattr("keras_distplug.runlog.sinks.UploadPace.every_secs", 0.0)


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def values_in(url: str, folder: Path) -> list[tuple[int, float]]:
    files = open_files(url)
    (folder / "run").mkdir()
    for name in files.names("run"):
        (folder / "run" / name).write_bytes(files.read(f"run/{name}"))
    return curves_in(folder)["run"]["tag"]


@pytest.mark.parametrize("trouble", [{"lost": 1}, {"failing": 2}, {"lost": 2, "failing": 1}])
def test_failed_uploads_are_retried(url: str, trouble: dict[str, int], tmp_path: Path) -> None:
    """Data whose upload failed, or seemed to fail, is in the store exactly once in the end."""
    files = Trouble(url, **trouble)
    written = EventFiles(files, "run")
    failures = 0
    for step in range(5):
        written.add_scalar("tag", step / 2, step)
        try:
            written.flush_if_due()
        except TimeoutError:
            failures += 1
    written.close()
    assert failures == files.met == sum(trouble.values())
    # Files of the same second have no order.
    assert sorted(values_in(url, tmp_path)) == [(step, step / 2) for step in range(5)]


def test_existing_file_of_another_process(url: str) -> None:
    """A file of that name with other content is neither taken for ours nor overwritten."""
    files = open_files(url)
    written = EventFiles(files, "run")
    written.add_scalar("tag", 1.0, 1)
    [path] = written.path.iterdir()
    files.create(f"run/{path.name}", [b"theirs"])
    with pytest.raises(FileExistsError):
        written.flush_if_due()
    assert files.read(f"run/{path.name}") == b"theirs"
    assert path.exists()


def test_failed_run(url: str) -> None:
    """A failed upload of one run's curves does not affect those of other runs."""
    files = Trouble(url, failing=1)
    curves = ReplicaCurves(files)
    with pytest.raises(TimeoutError):
        curves.add([StepReport(n, f"worker-{n}", 1, 1, 0.1, ()) for n in range(2)])
    curves.close()
    assert files.met == 1
    assert len(files.names()) == 6  # two of workers, and four of both together


def test_custom_scalars(tmp_path: Path) -> None:
    """The layout has charts only for values that exist, and none before there are any."""
    curves = ReplicaCurves(open_files(tmp_path))
    assert layouts_in(tmp_path) == []
    curves.add([StepReport(0, "worker-0", 1, 1, 0.1, (), memory_bytes=1)])
    curves.close()
    [layout] = layouts_in(tmp_path)
    [category] = layout.category
    assert category.title == "Distplug: replicas and workers"
    assert [chart.title for chart in category.chart] == ["memory_mb", "step_ms"]
    assert category.chart[0].multiline.tag == ["^distplug/memory_mb$"]


def layouts_in(folder: Path) -> list[layout_pb2.Layout]:
    found = []
    for run in folder.iterdir():
        events = EventAccumulator(str(run))
        events.Reload()
        if CONFIG_SUMMARY_TAG in events.Tags()["tensors"]:
            *_, last = events.Tensors(CONFIG_SUMMARY_TAG)
            text = tensor_util.make_ndarray(last.tensor_proto).item()
            found.append(layout_pb2.Layout.FromString(text))
    return found
