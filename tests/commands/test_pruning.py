"""`prune`: which checkpoints it deletes, and above all which it keeps."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import made
from commands.conftest import Ask
from storage.checkpoints import RUN

from keras_distplug.storage.files import open_files
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.stores.local import LocalFiles

Say = Callable[..., tuple[int, str]]


def names(directory: str | Path, run: str = RUN) -> list[str]:
    return [name for name in open_files(directory).names(run) if "-" in name]


def gone(document: Any) -> dict[str, str]:
    return {each["name"]: each["why"] for each in document["deleted"]}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ((), {4, 8, 12}),
        (("--keep-last", "1"), {4, 8, 12, 16}),
        (("--keep-last", "4"), {4}),
        (("--keep-last", "1", "--keep-every-steps", "8"), {4, 12}),
        (("--keep-last", "1", "--keep-best", "val_loss", "min", "1"), {4, 12, 16}),
        (("--keep-last", "1", "--keep-best", "val_loss", "max", "2"), {8, 16}),
    ],
)
def test_deleted_checkpoints(
    keep: tuple[str, ...], expected: set[int], directory: str, ask: Ask
) -> None:
    """Step and final checkpoints that no rule keeps are deleted; the rest stays intact."""
    losses = {4: 0.9, 8: 0.1, 12: 0.8, 16: 0.5, 20: 0.6}
    store = made.run(directory, *(made.state(step, loss) for step, loss in losses.items()))
    store.save(made.final(20))
    code, told = ask("prune", directory, *keep)
    assert code == 0
    assert gone(told) == {f"step-{step:08d}": "old" for step in expected}
    left = losses.keys() - expected
    assert names(directory) == ["final-00000020", *(f"step-{step:08d}" for step in sorted(left))]
    for name in names(directory):
        store.verify(name)
    assert ask("prune", directory, *keep)[1]["deleted"] == []


def test_dry_run(directory: str, ask: Ask, say: Say) -> None:
    """A dry run lists what would be deleted and how large it is, and changes nothing."""
    made.run(directory, *(made.state(step) for step in (4, 8, 12)))
    made.cut_off(directory, "step-00000006")
    before = made.listing(directory)
    code, told = ask("prune", directory, "--keep-last", "1", "--dry-run")
    assert (code, told["dry_run"]) == (0, True)
    assert gone(told) == {
        "step-00000004": "old", "step-00000006": "cut off", "step-00000008": "old",
    }  # fmt: skip
    assert told["bytes"] == sum(each["bytes"] for each in told["deleted"])
    code, printed = say("prune", directory, "--keep-last", "1", "--dry-run")
    assert re.search(rf"(?m)^{RUN}/step-00000006: would be deleted, cut off, 100 B$", printed)
    assert "3 checkpoints would be deleted" in printed
    assert made.listing(directory) == before
    assert ask("prune", directory, "--keep-last", "1")[1]["deleted"] == told["deleted"]
    assert names(directory) == ["step-00000012"]


def test_all_runs(tmp_path: Path, ask: Ask) -> None:
    """All runs are pruned separately, or only the selected one."""
    for name in (RUN, "run-0002"):
        made.run(tmp_path, *(made.state(step) for step in (4, 8)), name=name)
    ask("prune", tmp_path, "--keep-last", "1", "--run", "run-0002")
    assert (len(names(tmp_path)), len(names(tmp_path, "run-0002"))) == (2, 1)
    ask("prune", tmp_path, "--keep-last", "1")
    assert names(tmp_path) == names(tmp_path, "run-0002") == ["step-00000008"]


def test_saves_in_progress(directory: str, ask: Ask) -> None:
    """A save newer than the newest committed checkpoint is left alone, as is everything in a run
    without one."""
    made.run(directory, made.state(4), made.state(8))
    made.run(directory, name="run-0002")
    for name in ("step-00000010", "step-00000008-2", "final-00000006"):
        made.cut_off(directory, name)
    made.cut_off(directory, "step-00000002", "run-0002")
    before = made.listing(directory)
    code, told = ask("prune", directory)
    assert (code, told["deleted"]) == (0, [])
    assert made.listing(directory) == before


def test_commit_meanwhile(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that training commits meanwhile stays, as does the newest one before it."""
    store = made.run(tmp_path, made.state(4), made.state(8))
    stock, saved = LocalFiles.size, []

    def size(self: Any, path: str) -> int:
        if not saved:
            saved.append(path)
            store.save(made.state(12))
        return stock(self, path)

    monkeypatch.setattr(LocalFiles, "size", size)
    code, told = ask("prune", tmp_path, "--keep-last", "1")
    assert saved
    assert (code, gone(told)) == (0, {"step-00000004": "old"})
    assert names(tmp_path) == ["step-00000008", "step-00000012"]


@pytest.mark.parametrize("harm", [harm for harm in made.HARM if harm != "flipped"])
def test_damaged_checkpoints(harm: str, tmp_path: Path, ask: Ask) -> None:
    """A damaged checkpoint does not count as one that is kept. It is deleted only on request, and
    only if a newer one is intact."""
    store = made.run(tmp_path, *(made.state(step) for step in (4, 8, 12, 16)))
    do, _, _ = made.HARM[harm]
    do(tmp_path / RUN / "step-00000008")
    do(tmp_path / RUN / "step-00000016")
    assert gone(ask("prune", tmp_path)[1]) == {}
    assert gone(ask("prune", tmp_path, "--keep-last", "1")[1]) == {"step-00000004": "old"}
    told = ask("prune", tmp_path, "--keep-last", "1", "--damaged")[1]
    assert gone(told) == {"step-00000008": "damaged"}
    assert names(tmp_path) == ["step-00000012", "step-00000016"]
    store.verify("step-00000012")


def test_only_damaged_checkpoints(tmp_path: Path, ask: Ask) -> None:
    """If no checkpoint is intact, nothing is deleted."""
    made.run(tmp_path, made.state(4), made.state(8))
    for step in (4, 8):
        made.HARM["cut"][0](tmp_path / RUN / f"step-{step:08d}")
    made.cut_off(tmp_path, "step-00000002")
    before = made.contents(tmp_path)
    assert gone(ask("prune", tmp_path, "--damaged")[1]) == {}
    assert made.contents(tmp_path) == before


def test_newest_is_verified(tmp_path: Path, say: Say) -> None:
    """Nothing is deleted, or marked, if a bit has flipped in the checkpoint that should stay."""
    made.run(tmp_path, made.state(4), made.state(8))
    made.HARM["flipped"][0](tmp_path / RUN / "step-00000008")
    before = made.contents(tmp_path)
    code, printed = say("prune", tmp_path, "--keep-last", "1")
    assert code == 1
    assert "Nothing was deleted" in printed
    assert "has changed since it was written" in printed
    assert made.contents(tmp_path) == before


def test_second_newest_is_verified(tmp_path: Path, ask: Ask) -> None:
    """If a bit has flipped in the checkpoint before the newest, an older one stays in its place; a
    dry run reports the same. The damaged one is deleted only on request."""
    store = made.run(tmp_path, *(made.state(step) for step in (4, 8, 12, 16)))
    store.save(made.final(16))
    made.HARM["flipped"][0](tmp_path / RUN / "step-00000012")
    before = made.contents(tmp_path)
    expected = {"step-00000004": "old"}
    assert gone(ask("prune", tmp_path, "--keep-last", "2", "--dry-run")[1]) == expected
    assert made.contents(tmp_path) == before
    assert gone(ask("prune", tmp_path, "--keep-last", "2")[1]) == expected
    for name in ("step-00000008", "step-00000016", "final-00000016"):
        store.verify(name)
    told = ask("prune", tmp_path, "--keep-last", "2", "--damaged")[1]
    assert gone(told) == {"step-00000012": "damaged"}


def test_second_newest_cannot_be_read(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that one cannot be read, an older one stays, too. Other runs are pruned."""
    made.run(tmp_path, *(made.state(step) for step in (4, 8, 12)))
    made.run(tmp_path, *(made.state(step) for step in (3, 7, 11)), name="run-0002")
    stock, refused = LocalFiles.read_into, []

    def read_into(self: Any, path: str, offset: int, buffer: memoryview) -> int:
        if "step-00000008" in path:
            refused.append(path)
            raise PermissionError(errno.EACCES, "no")
        return stock(self, path, offset, buffer)

    monkeypatch.setattr(LocalFiles, "read_into", read_into)
    before = made.contents(tmp_path / RUN)
    code, printed = say("prune", tmp_path, "--keep-last", "2")
    assert (code, bool(refused)) == (0, True)
    assert f"{RUN}/step-00000008: kept, " in printed
    assert "run-0002/step-00000003: deleted" in printed
    assert made.contents(tmp_path / RUN) == before


def test_cut_off(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning that is interrupted leaves no incomplete checkpoint that counts."""
    store = made.run(tmp_path, *(made.state(step) for step in (4, 8, 12)))
    stock, deleted = CheckpointStore.delete, []

    def delete(self: CheckpointStore, name: str, file: str = "") -> None:
        if len(deleted) == 1:
            raise KeyboardInterrupt
        deleted.append((name, file))
        stock(self, name, file)

    monkeypatch.setattr(CheckpointStore, "delete", delete)
    assert ask("prune", tmp_path, "--keep-last", "1")[0] == 130
    assert deleted == [("step-00000004", "MANIFEST.json")]
    monkeypatch.undo()
    code, told = ask("verify", tmp_path, "--deep")
    assert (code, told["whole"], told["damaged"]) == (0, 2, 0)
    assert gone(ask("prune", tmp_path)[1]) == {"step-00000004": "cut off"}
    store.verify("step-00000012")
