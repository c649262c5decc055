"""Checkpoints in two places: often on the workers' own machines, less often in shared storage."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(300), pytest.mark.usefixtures("tried_once")]

import keras  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.checkpoint import saver  # noqa: E402
from keras_distplug.cluster.channel import Channel  # noqa: E402
from keras_distplug.core.errors import ConfigurationError, CorruptCheckpointError  # noqa: E402
from keras_distplug.storage.stores.local import LocalFiles  # noqa: E402

SHARED_AT, LOCAL_AT = 4, 8  # steps of the newest checkpoint in either place, after `interrupt`


def fit(
    folder: Path, *callbacks: keras.callbacks.Callback, epochs: int = 4, **arguments: Any
) -> list[bytes]:
    """Saves shared checkpoints if an epoch has `save_freq` batches, local ones at every epoch's
    end."""
    model = small.model()
    chosen = {"save_freq": "2h", "local_tier": folder / "local", "local_freq": "epoch"} | arguments
    backup = kd.BackupAndRestore(
        folder / "shared", delete_checkpoint=False, on_busy="wait", **chosen
    )
    model.fit(
        small.X, small.Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[backup, *callbacks],
    )  # fmt: skip
    return small.state(model)


def interrupt(folder: Path) -> None:
    """Returns a run with a shared checkpoint after its first epoch, and a local one after its
    second."""
    with pytest.raises(small.Interrupted):
        fit(folder, small.Stop(1, 0), save_freq="epoch", local_tier=None, local_freq=None)
    saver.wait_for_all()
    with pytest.raises(small.Interrupted):
        fit(folder, small.Stop(2, 1))
    saver.wait_for_all()
    assert steps_in(folder / "shared") == [SHARED_AT]
    assert steps_in(folder / "local") == [LOCAL_AT]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.rglob("step-*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return fit(tmp_path_factory.mktemp("undisturbed"), local_tier=None, local_freq=None)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    interrupt(folder)
    return folder


@pytest.fixture
def folder(interrupted: Path, tmp_path: Path) -> Path:
    """A run that was interrupted; every test gets a separate one."""
    return shutil.copytree(interrupted, tmp_path / "run")


def test_process_is_lost(
    folder: Path, undisturbed: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """The local checkpoint is newer, so training resumes from it. At the end of training, none is
    left."""
    caplog.clear()
    assert fit(folder) == undisturbed
    assert "resuming at epoch 3/4, step 8" in caplog.text
    assert f"local checkpoint {folder / 'local'}" in caplog.text
    assert list((folder / "local").iterdir()) == []
    assert (folder / "shared" / "run-0001" / "final-00000016" / "MANIFEST.json").exists()


def test_machine_is_lost(
    folder: Path, undisturbed: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Without local ones, training resumes from the newest shared checkpoint."""
    shutil.rmtree(folder / "local")
    caplog.clear()
    assert fit(folder) == undisturbed
    assert "checkpoint step-00000004: resuming at epoch 2/4" in caplog.text


def test_newer_shared_checkpoint(
    folder: Path, undisturbed: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A local checkpoint that is older than the newest shared one is not used."""
    with pytest.raises(small.Interrupted):
        fit(folder, small.Stop(3, 1), save_freq="epoch", local_tier=None, local_freq=None)
    saver.wait_for_all()
    caplog.clear()
    assert fit(folder) == undisturbed
    assert "checkpoint step-00000012: resuming at epoch 4/4" in caplog.text


@pytest.mark.parametrize("pattern", ["*.safetensors", "MANIFEST.json"])
@pytest.mark.parametrize("harm", ["bit", "cut", "gone"])
def test_local_damage(
    pattern: str,
    harm: str,
    folder: Path,
    undisturbed: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A changed local checkpoint is reported; training resumes from another one."""
    [path] = (folder / "local").rglob(pattern)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if harm != "gone":
        path.write_bytes(data if harm == "bit" else data[:-3])
    caplog.clear()
    if pattern == "MANIFEST.json" and harm == "gone":
        assert fit(folder) == undisturbed
    else:
        with pytest.warns(UserWarning, match=f"ocal.*{path.name}"):
            assert fit(folder) == undisturbed
    assert "checkpoint step-00000004: resuming at epoch 2/4" in caplog.text


def test_unreadable_local_checkpoint(
    folder: Path, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose disk fails costs no more than losing it would."""
    stock, failed = LocalFiles.read_into, []

    def read_into(self: LocalFiles, path: str, offset: int, buffer: memoryview) -> int:
        if str(folder / "local") in self.where(path):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stock(self, path, offset, buffer)

    monkeypatch.setattr(LocalFiles, "read_into", read_into)
    with pytest.warns(UserWarning, match="Skipped the local checkpoint .*Input/output error"):
        assert fit(folder) == undisturbed
    assert failed


@pytest.mark.parametrize("harm", ["shards", "manifests"])
def test_damaged_shared_checkpoints(harm: str, folder: Path, undisturbed: list[bytes]) -> None:
    """An intact local checkpoint is used even if no shared one is intact; without it, that is an
    error."""
    names = {"shards": "*.safetensors", "manifests": "MANIFEST.json"}
    for path in (folder / "shared").rglob(names[harm]):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    shutil.copytree(folder, folder / "copy")
    shutil.rmtree(folder / "copy" / "local")
    with (
        pytest.warns(UserWarning, match="step-00000004 is quarantined"),
        pytest.raises(CorruptCheckpointError, match="names start with step- are damaged"),
    ):
        fit(folder / "copy")
    assert fit(folder) == undisturbed


def test_missing_on_another_worker(
    folder: Path,
    undisturbed: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A local checkpoint that one worker lacks is used by none, and is deleted after later ones."""
    asked = []

    def gather(self: Channel, topic: str, value: str) -> list[str]:
        asked.append(value)
        return [value, "{}"]

    with monkeypatch.context() as with_other:
        with_other.setattr(Channel, "gather", gather)
        with pytest.raises(small.Interrupted):
            fit(folder, small.Stop(1, 3), local_freq=1)
    saver.wait_for_all()
    [said] = asked
    assert '[8, "' in said
    assert "checkpoint step-00000004: resuming at epoch 2/4" in caplog.text
    assert steps_in(folder / "local") == [6, 7]
    assert fit(folder, epochs=4, resume=False) == undisturbed


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_local_storage_that_fails(
    code: int, tmp_path: Path, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local saves that fail are all reported, and do not end training."""
    stock, failed = LocalFiles.create, []

    def create(self: LocalFiles, path: str, parts: Iterable[bytes | memoryview]) -> None:
        if str(tmp_path / "local") in self.where(path):
            failed.append(path)
            raise OSError(code, os.strerror(code), path)
        stock(self, path, parts)

    monkeypatch.setattr(LocalFiles, "create", create)
    with pytest.warns(
        UserWarning,
        match=r"Saving a local checkpoint failed or takes too long \(consecutive failures: 4\)\. ",
    ):
        assert fit(tmp_path, max_failed_saves=1) == undisturbed
    assert len(failed) == 4


def test_other_run(folder: Path, undisturbed: list[bytes]) -> None:
    """Local checkpoints belong to one run: another run in the same folder does not see them."""
    assert fit(folder, resume=False) == undisturbed
    assert steps_in(folder / "local") == [LOCAL_AT]


def test_more_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A finished run that continues, and is interrupted, resumes from its local checkpoint."""
    fit(tmp_path, epochs=2)
    with pytest.raises(small.Interrupted):
        fit(tmp_path, small.Stop(3, 1))
    saver.wait_for_all()
    expected = fit(tmp_path / "undisturbed", epochs=2) and fit(tmp_path / "undisturbed")
    caplog.clear()
    assert fit(tmp_path) == expected
    assert "resuming at epoch 4/4, step 12" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local_freq": 3}, "`local_tier`, which is not given. Received: local_freq=3"),
        ({"local_tier": "memory://a"}, "folder on every worker's own machine.*memory://a"),
        ({"local_tier": "a", "local_freq": "often"}, "Expected `local_freq`.*'often'"),
        ({"local_tier": "a", "local_freq": 0}, "Expected `local_freq`.*=0"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Invalid arguments are refused before anything is written."""
    with pytest.raises(ConfigurationError, match=message):
        kd.BackupAndRestore(tmp_path / "shared", **arguments)
    assert list(tmp_path.iterdir()) == []
