"""Nothing intact is deleted because something next to it is damaged, missing or unreadable."""

from __future__ import annotations

import errno
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stamina
from checkpoints import RUN, Checkpoints
from watched import WatchedFiles

from keras_distplug.core.errors import CheckpointError, SaveError
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.stores.local import LocalFiles
from keras_distplug.storage.stores.object_store import MemoryStore, RemoteObjects

Damage = Callable[[Files, str], None]


def state(step: int, **changes: Any) -> TrainState:
    return TrainState(Cursor(0, 0, step), {"a": np.full(9, step, np.float32)}, **changes)


def name(step: int) -> str:
    return f"step-{step:08d}"


@pytest.fixture(autouse=True)
def no_retries() -> Iterator[None]:
    stamina.set_testing(True, attempts=1)
    yield
    stamina.set_testing(False)


@pytest.fixture(params=["disk", "store"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A local folder, and one in an object store."""
    return str(tmp_path / "root") if request.param == "disk" else f"memory://{uuid.uuid4().hex}"


def there(url: str) -> list[int]:
    """Returns the steps of all checkpoints."""
    return [int(each.rpartition("-")[2]) for each in open_files(url).names(RUN)]


def intact(url: str) -> list[int]:
    """Returns the steps of the checkpoints that a process without prior knowledge can read."""
    found = []
    for step in there(url):
        try:
            Checkpoints(open_files(url)).verify(name(step))
        except CheckpointError:
            continue
        found.append(step)
    return found


# Damage


def shard(files: Files, checkpoint: str) -> str:
    folder = f"{RUN}/{checkpoint}"
    [attempt] = [each for each in files.names(folder) if "." not in each]
    [file] = files.names(f"{folder}/{attempt}")
    return f"{folder}/{attempt}/{file}"


def replace(files: Files, path: str, change: Callable[[bytes], bytes]) -> None:
    content = change(files.read(path))
    files.delete(path)
    files.create(path, [content])


def flip(files: Files, checkpoint: str) -> None:
    replace(files, shard(files, checkpoint), lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def cut(files: Files, checkpoint: str) -> None:
    replace(files, shard(files, checkpoint), lambda data: data[:-1])


def lose(files: Files, checkpoint: str) -> None:
    files.delete(shard(files, checkpoint))


def change_manifest(files: Files, checkpoint: str) -> None:
    replace(
        files, f"{RUN}/{checkpoint}/MANIFEST.json", lambda data: data.replace(b'"step"', b'"stop"')
    )


DAMAGES = {"flipped": flip, "cut": cut, "lost": lose, "manifest": change_manifest}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("restarted", [False, True])
def test_damaged_before_the_newest(url: str, damage: Damage, restarted: bool) -> None:
    """If the second newest checkpoint turns out to be damaged, it is quarantined, and an intact
    older one is kept instead; over a network, its bytes are not read for this."""
    saving = Checkpoints(open_files(url))
    for step in (1, 2):
        saving.save(state(step))
    damage(open_files(url), name(2))
    if restarted:
        saving = Checkpoints(open_files(url))
    if damage is flip and url.startswith("memory:"):
        saving.save(state(3))
        assert there(url) == [2, 3]
        return
    with pytest.warns(UserWarning, match=rf"{name(2)} is quarantined") as warned:
        saving.save(state(3))
    assert len(warned) == 1
    assert "DAMAGED.json" in open_files(url).names(f"{RUN}/{name(2)}")
    assert (there(url), intact(url)) == ([1, 2, 3], [1, 3])
    saving.save(state(4))
    assert (there(url), intact(url)) == ([2, 3, 4], [3, 4])


@pytest.mark.parametrize("damage", [cut, lose])
def test_damaged_after_it_was_verified(url: str, damage: Damage) -> None:
    """A checkpoint that was verified as the newest one is checked again before others are
    deleted."""
    saving = Checkpoints(open_files(url))
    for step in (1, 2, 3):
        saving.save(state(step))
    assert there(url) == [2, 3]
    damage(open_files(url), name(3))
    with pytest.warns(UserWarning, match=rf"{name(3)} is quarantined"):
        saving.save(state(4))
    assert intact(url) == [2, 4]


@pytest.mark.parametrize("keep_last", [2, 5])
def test_several_damaged(url: str, keep_last: int) -> None:
    """Damaged checkpoints are quarantined one by one, until the two newest are intact."""
    saving = Checkpoints(open_files(url), keep_last=keep_last)
    for step in range(1, keep_last + 1):
        saving.save(state(step))
    for step in (keep_last, keep_last - 1):
        lose(open_files(url), name(step))
    with pytest.warns(UserWarning, match="is quarantined"):
        saving.save(state(9))
    assert intact(url)[-1] == 9
    assert intact(url) == [*range(1, keep_last - 1), 9]


def test_marked_by_another_process(url: str) -> None:
    """A checkpoint that another process marked as damaged does not count as one that is kept."""
    saving = Checkpoints(open_files(url))
    for step in (1, 2, 3):
        saving.save(state(step))
    open_files(url).create(f"{RUN}/{name(3)}/DAMAGED.json", [b"{}"])
    saving.save(state(4))
    assert there(url) == [2, 3, 4]
    saving.save(state(5))
    assert there(url) == [3, 4, 5]


def test_outdated_checkpoint_marked_by_another_process(url: str) -> None:
    """A marked checkpoint is not deleted when it becomes outdated, either."""
    saving = Checkpoints(open_files(url), keep_last=1)
    saving.save(state(1))
    open_files(url).create(f"{RUN}/{name(1)}/DAMAGED.json", [b"{}"])
    for step in (2, 3):
        saving.save(state(step))
    assert there(url) == [1, 3]


# The retention, the damaged step, the steps saved afterwards, and those that are kept.
RULES: dict[str, tuple[dict[str, Any], int, tuple[int, ...], list[int]]] = {
    "last": ({"keep_last": 4}, 3, (5,), [1, 2, 4, 5]),
    "best": ({"keep_last": 1, "keep_best": ("loss", "min", 1)}, 2, (5,), [4, 5]),
    "every": ({"keep_last": 1, "keep_every_steps": 2}, 4, (5, 6), [2, 5, 6]),
}


@pytest.mark.parametrize("file", ["DAMAGED.json", "MANIFEST.json"])
@pytest.mark.parametrize("rule", RULES)
def test_kept_checkpoint_damaged_by_another_process(url: str, rule: str, file: str) -> None:
    """Whichever rule keeps it, a damaged checkpoint does not count, and an older or worse one is
    kept."""
    rules, harmed, later, stay = RULES[rule]
    saving = Checkpoints(open_files(url), **rules)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, 0.4)):
        saving.save(state(step, metrics={"loss": loss}))
    files = open_files(url)
    if file == "DAMAGED.json":
        files.create(f"{RUN}/{name(harmed)}/{file}", [b"{}"])
    else:
        files.delete(f"{RUN}/{name(harmed)}/{file}")
    for step in later:
        saving.save(state(step, metrics={"loss": 0.6}))
    assert [step for step in intact(url) if step != harmed] == stay


@pytest.mark.parametrize("keep_last", [2, 3])
def test_deleted_by_another_process(url: str, keep_last: int) -> None:
    """A checkpoint that was deleted manually does not count as one that is kept."""
    saving = Checkpoints(open_files(url), keep_last=keep_last)
    for step in range(1, 5):
        saving.save(state(step))
    open_files(url).delete(f"{RUN}/{name(4)}")
    saving.save(state(5))
    assert there(url) == [*range(5 - keep_last, 4), 5]


def test_deleted_during_a_save(url: str) -> None:
    """A checkpoint that is deleted while the next one is written does not count either."""
    files = open_files(url)
    saving = Checkpoints(files)
    for step in (1, 2, 3):
        saving.save(state(step))
    create, deleted = files.create, []

    def delete_meanwhile(path: str, parts: Iterable[bytes | memoryview]) -> None:
        create(path, parts)
        deleted.append(path)
        open_files(url).delete(f"{RUN}/{name(3)}")

    files.create = delete_meanwhile  # type: ignore[method-assign]
    saving.save(state(4))
    assert deleted
    assert (there(url), intact(url)) == ([2, 4], [2, 4])


def test_unreadable_before_the_newest(url: str) -> None:
    """While the second newest checkpoint cannot be read, nothing is deleted or quarantined."""
    for step in (1, 2):
        Checkpoints(open_files(url)).save(state(step))
    watched = WatchedFiles(open_files(url))
    saving = Checkpoints(watched)
    watched.fail("read", name(2), OSError(errno.EIO, "broken"))
    with pytest.warns(UserWarning, match="were not deleted: .*broken") as warned:
        saving.save(state(3))
    assert watched.fired == len(warned) == 1
    assert intact(url) == [1, 2, 3]
    watched.mend()
    saving.save(state(4))
    assert intact(url) == [3, 4]


def test_unlistable_before_the_newest(url: str) -> None:
    """The same holds if its folder cannot be listed."""
    watched = WatchedFiles(open_files(url))
    saving = Checkpoints(watched)
    for step in (1, 2, 3):
        saving.save(state(step))
    watched.fail("names", f"{RUN}/{name(3)}", OSError(errno.EIO, "broken"))
    with pytest.warns(UserWarning, match="were not deleted: .*broken"):
        saving.save(state(4))
    assert watched.fired == 1
    assert intact(url) == [2, 3, 4]


def test_damaged_manifest_of_a_best_checkpoint(url: str) -> None:
    """A checkpoint whose metric can no longer be read is quarantined; saves continue."""
    rules = {"keep_best": ("loss", "min", 1)}
    saving = Checkpoints(open_files(url), keep_last=1, **rules)
    for step, loss in ((1, 0.1), (2, 0.5)):
        saving.save(state(step, metrics={"loss": loss}))
    change_manifest(open_files(url), name(1))
    with pytest.warns(UserWarning, match=rf"{name(1)} is quarantined"):
        Checkpoints(open_files(url), keep_last=1, **rules).save(state(3, metrics={"loss": 0.7}))
    assert intact(url) == [2, 3]


class Forgets(RemoteObjects):
    """An object store whose recursive listings miss a checkpoint."""

    missed = 0

    def names_below(self, folder: str) -> list[str]:
        found = [each for each in super().names_below(folder) if not each.startswith(name(1))]
        self.missed += len(super().names_below(folder)) - len(found)
        return found


def test_listing_that_misses_a_checkpoint() -> None:
    """A checkpoint that a listing misses is not taken for leftovers of an interrupted save: its
    folder is listed before it is deleted."""
    url = f"memory://{uuid.uuid4().hex}"
    for step in (1, 2):
        Checkpoints(open_files(url)).save(state(step))
    files = Forgets(MemoryStore(), url, {})
    Checkpoints(files, keep_last=9).save(state(3))
    assert files.missed
    assert intact(url) == [1, 2, 3]


class Counted(LocalFiles):
    """Counts the reads of every file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[str] = Counter()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        self.reads[path.split("/")[1]] += not offset
        return super().read_into(path, offset, buffer)


def test_read_once(tmp_path: Path) -> None:
    """A process reads the bytes of a checkpoint once, as its newest or as the second newest of
    another process; older ones are not read."""
    for step in (1, 2, 3):
        Checkpoints(tmp_path, keep_last=3).save(state(step))
    files = Counted(tmp_path)
    saving = Checkpoints(files, keep_last=3)
    for step in (4, 5, 6):
        saving.save(state(step))
    assert files.reads == {name(3): 1, name(4): 1, name(5): 1, name(6): 1}


def test_second_save_of_a_step(url: str) -> None:
    """A step whose save failed is saved again as a whole, and no leftovers of the failure
    remain."""
    watched = WatchedFiles(open_files(url))
    saving = Checkpoints(watched)
    saving.save(state(1))
    watched.fail("create", "MANIFEST.json", OSError(errno.EIO, "broken"))
    watched.fail("delete", name(2), OSError(errno.EIO, "broken"))
    with pytest.warns(UserWarning, match="files of a failed save"), pytest.raises(SaveError):
        saving.save(state(2))
    watched.mend()
    assert watched.fired == 2
    assert there(url) == [1, 2]
    saving.save(state(2))
    assert intact(url) == [1, 2]
    assert shard(open_files(url), name(2))  # of one attempt
    for step in (3, 4):
        saving.save(state(step))
    assert intact(url) == [3, 4]


def test_leftovers_in_a_known_checkpoint(url: str) -> None:
    """After a failed save, known checkpoints are listed again, too: leftovers in their folders may
    have caused the failure."""
    watched = WatchedFiles(open_files(url))
    saving = Checkpoints(watched)
    for step in (1, 2):
        saving.save(state(step))
    open_files(url).create(f"{RUN}/{name(1)}/killed/rank-0-1.safetensors", [b"half"])
    watched.fail("create", "MANIFEST.json", OSError(errno.ENOSPC, "full"))
    with pytest.raises(SaveError, match="full"):
        saving.save(state(3))
    assert watched.fired == 1
    assert "killed" not in open_files(url).names(f"{RUN}/{name(1)}")
    assert intact(url) == [1, 2]
