"""Local checkpoints: which ones are found on a machine, and which are deleted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keras_distplug.checkpoint.local_tier import LocalTier, LocalWriter
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.stores.local import LocalFiles


class Nobody:
    def send(self, topic: str, text: str) -> None:
        return

    def receive(self, topic: str, timeout_s: float) -> str:
        raise AssertionError(topic)


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier(LocalFiles(tmp_path), "a-run")


def state(step: int) -> TrainState:
    return TrainState(Cursor(epoch=0, batch=step, step=step), {"model/a": np.full(3, step)})


def save(writer: LocalWriter, *steps: int) -> None:
    for step in steps:
        writer.save(state(step), f"attempt-{step}")


def found(tier: LocalTier) -> set[str]:
    return set(tier.copies())


def test_nothing(tier: LocalTier) -> None:
    """A machine without local checkpoints has none to find or delete."""
    assert tier.copies() == {}
    tier.delete_sessions()


def test_copies(tier: LocalTier) -> None:
    """The two newest of every worker are found, whichever worker looks, and hold the saved
    values."""
    for rank in range(2):
        save(tier.writer("s1", rank, Nobody()), 1, 2, 3)
    copies = tier.copies()
    assert copies.keys() == {"attempt-2", "attempt-3"}
    stored = copies["attempt-3"].stored
    assert stored.manifest.cursor == Cursor(0, 3, 3)
    assert np.array_equal(stored.arrays["model/a"], [3, 3, 3])


def test_earlier_sessions(tier: LocalTier, tmp_path: Path) -> None:
    """Checkpoints of an earlier session stay until this one has two, even if the earlier ones are
    newer; those of other runs stay."""
    other = LocalTier(LocalFiles(tmp_path), "another-run")
    save(other.writer("s1", 0, Nobody()), 9)
    save(tier.writer("s1", 0, Nobody()), 7, 8)
    writer = tier.writer("s2", 1, Nobody())
    save(writer, 3)
    assert found(tier) == {"attempt-3", "attempt-7", "attempt-8"}
    save(writer, 4)
    assert found(tier) == {"attempt-3", "attempt-4"}
    assert found(other) == {"attempt-9"}


def test_other_workers_of_the_machine(tier: LocalTier) -> None:
    """A session's workers leave each other's checkpoints alone."""
    writers = [tier.writer("s1", rank, Nobody()) for rank in range(2)]
    save(writers[0], 1)
    save(writers[1], 1, 2, 3)
    assert found(tier) == {"attempt-1", "attempt-2", "attempt-3"}


def test_cut_off(tier: LocalTier, tmp_path: Path) -> None:
    """A checkpoint without a manifest does not count; a damaged manifest causes a warning."""
    save(tier.writer("s1", 0, Nobody()), 1, 2)
    first, second = sorted(tmp_path.rglob("MANIFEST.json"))
    first.unlink()
    assert found(tier) == {"attempt-2"}
    second.write_text(second.read_text().replace('"step": 2', '"step": 3'))
    with pytest.warns(
        UserWarning,
        match=r"is not used to resume: .*MANIFEST.json was",
    ):
        assert found(tier) == set()


def test_end(tier: LocalTier, tmp_path: Path) -> None:
    """At the end, everything that the run has left on the machine is deleted."""
    save(tier.writer("s1", 0, Nobody()), 1)
    save(tier.writer("s2", 0, Nobody()), 1)
    tier.delete_sessions()
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_deleted(
    tier: LocalTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be deleted occupies disk space, which is reported, and has no other
    effect."""

    def fail(self: LocalFiles, path: str) -> None:
        raise PermissionError(path)

    save(tier.writer("s1", 0, Nobody()), 1)
    monkeypatch.setattr(LocalFiles, "delete", fail)
    with pytest.warns(UserWarning, match="were not deleted"):
        tier.delete_sessions()
    assert found(tier) == {"attempt-1"}
