"""`export` to safetensors, and rules for all formats: the place of a file, and the time at which it
appears."""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from commands import made
from commands.conftest import Ask
from storage.checkpoints import RUN

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage import codec, export_file, target
from keras_distplug.storage.export_file import Export
from keras_distplug.storage.files import open_files

Say = Callable[..., tuple[int, str]]


def weights(state: TrainState) -> dict[str, Any]:
    return {key: value for key, value in state.arrays.items() if key.startswith("model/")}


def loaded(data: bytes) -> dict[str, np.ndarray]:
    """Returns what `safetensors.numpy.load` would return if all its releases had bfloat16."""
    names = {"BF16": "bfloat16", "F32": "float32"}
    return {
        key: np.frombuffer(bytes(entry["data"]), names[entry["dtype"]]).reshape(entry["shape"])
        for key, entry in safetensors.deserialize(data)
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
        and found[key].tobytes() == value.tobytes()
        for key, value in expected.items()
    )


def test_safetensors(directory: str, tmp_path: Path, ask: Ask) -> None:
    """The file holds the model's variables by name, as the safetensors library reads them, and
    their origin."""
    made.run(directory, made.state(4), made.state(6))
    out = tmp_path / "model.safetensors"
    code, told = ask("export", directory, out)
    assert (code, told["run"], told["checkpoint"]) == (0, RUN, "step-00000006")
    assert (told["out"], told["format"]) == (str(out), "safetensors")
    assert same(loaded(out.read_bytes()), weights(made.state(6)))
    with safetensors.safe_open(out, "np") as file:
        said = file.metadata()
    assert said.pop("created_utc").endswith("+00:00")
    assert json.loads(said.pop("metrics")) == {"loss": 1 / 6, "val_loss": 0.5}
    assert said == {
        "format": "keras_distplug", "run": RUN, "checkpoint": "step-00000006", "step": "6",
        "epoch": "1", "batch": "2",
    }  # fmt: skip
    assert {*os.listdir(tmp_path)} - {"runs"} == {"model.safetensors"}


@pytest.mark.parametrize("world_size", [1, 3])
def test_shares(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that are split over several files are joined, whatever their order."""
    rng = np.random.default_rng(0)
    arrays = {
        f"model/{number}": rng.normal(size=size).astype("float32")
        for number, size in enumerate([(70_000,), (3, 5), (0, 2), (300, 400), ()])
    }
    stock = codec.list_shard_files
    monkeypatch.setattr(codec, "list_shard_files", lambda *given: world_size * stock(*given))
    store = made.run(tmp_path, TrainState(Cursor(1, 0, 4), {"optimizer/x": np.ones(9), **arrays}))
    stored = store.read("step-00000004")
    assert len(stored.manifest.shards) == world_size
    export_file.write_safetensors(tmp_path / "out", RUN, stored)
    assert same(safetensors.numpy.load_file(tmp_path / "out"), arrays)


def test_types_without_a_name(tmp_path: Path, ask: Ask) -> None:
    """Values of a type that safetensors lacks are stored as bytes, with their type."""
    values = np.arange(4).reshape(2, 2) * 1j
    made.run(tmp_path, TrainState(Cursor(1, 0, 4), {"model/c": values}))
    out = tmp_path / "model.safetensors"
    ask("export", tmp_path, out)
    assert safetensors.numpy.load_file(out)["model/c"].tobytes() == values.tobytes()
    with safetensors.safe_open(out, "np") as file:
        assert json.loads(file.metadata()["raw_dtypes"]) == {"model/c": "complex128"}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((), "final-00000012"),
        (("--step", "8"), "step-00000008"),
        (("--step", "12"), "step-00000012"),
        (("--step", "final-00000012"), "final-00000012"),
        (("--step", "best", "--metric", "val_loss", "--mode", "min"), "step-00000008"),
        (("--step", "best", "--metric", "val_loss", "--mode", "max"), "step-00000004"),
        (("--step", "best", "--metric", "accuracy", "--mode", "max"), "final-00000012"),
        (("--run", "run-0002"), "step-00000004"),
    ],
)
def test_selected_checkpoint(
    asked: tuple[str, ...], expected: str, tmp_path: Path, ask: Ask
) -> None:
    """Selects a step, a name, the best by a metric (the newest of equal ones), or the newest."""
    good = {"metrics": {"accuracy": 0.5}}
    saved = [made.state(4, 0.9), made.state(8, 0.1), made.state(12, **good), made.final(12, **good)]
    made.run(tmp_path, *saved)
    made.run(tmp_path, made.state(4), name="run-0002")
    out = tmp_path / "model.safetensors"
    arguments = asked if "--run" in asked else (*asked, "--run", RUN)
    assert ask("export", tmp_path, out, *arguments)[1]["checkpoint"] == expected


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (("--step", "5"), 3, "contains no complete checkpoint 5"),
        (("--step", "best", "--metric", "x", "--mode", "min"), 2, "metrics: loss, val_loss"),
        (("--format", "keras"), 3, "does not contain the architecture of the model"),
    ],
)
def test_missing_checkpoint(
    asked: tuple[str, ...], code: int, message: str, tmp_path: Path, say: Say
) -> None:
    """A missing checkpoint is an error, and no file is written."""
    made.run(tmp_path / "runs", made.state(4))
    found, printed = say("export", tmp_path / "runs", tmp_path / "out.safetensors", *asked)
    assert found == code
    assert message in printed
    assert os.listdir(tmp_path) == ["runs"]


@pytest.mark.parametrize("harm", made.HARM)
def test_damaged(harm: str, tmp_path: Path, say: Say) -> None:
    """A damaged checkpoint leaves no file, not even a part of one; an older one can be
    exported."""
    made.run(tmp_path / "runs", made.state(4), made.state(8))
    do, _, _ = made.HARM[harm]
    do(tmp_path / "runs" / RUN / "step-00000008")
    out = tmp_path / "out.safetensors"
    code, printed = say("export", tmp_path / "runs", out, "--step", "8")
    assert code == 1, printed
    assert "step-00000008" in printed
    assert os.listdir(tmp_path) == ["runs"]
    assert say("export", tmp_path / "runs", out, "--step", "4")[0] == 0
    assert same(loaded(out.read_bytes()), weights(made.state(4)))


# Where the file goes


@pytest.fixture(params=["local", "memory"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder = tmp_path / "out"
    folder.mkdir()
    return f"{folder if request.param == 'local' else f'memory://{uuid.uuid4().hex}'}/w.safetensors"


def beside(out: str) -> list[str]:
    return open_files(out.rpartition("/")[0]).names()


def test_overwrite(out: str, tmp_path: Path, say: Say) -> None:
    """An existing file stays, unless overwriting is requested."""
    made.run(tmp_path / "runs", made.state(4), made.state(8))
    assert say("export", tmp_path / "runs", out, "--step", "4")[0] == 0
    files = open_files(out.rpartition("/")[0])
    first = files.read("w.safetensors")
    code, printed = say("export", tmp_path / "runs", out)
    assert code == 2
    assert "already exists and was not changed" in printed
    assert files.read("w.safetensors") == first
    assert say("export", tmp_path / "runs", out, "--overwrite")[0] == 0
    found = loaded(open_files(out.rpartition("/")[0]).read("w.safetensors"))
    assert same(found, weights(made.state(8)))
    assert beside(out) == ["w.safetensors"]


def test_failed_overwrite(out: str, tmp_path: Path, say: Say) -> None:
    """An existing file stays if the checkpoint is damaged, even with --overwrite."""
    made.run(tmp_path / "runs", made.state(4), made.state(8))
    say("export", tmp_path / "runs", out, "--step", "4")
    made.HARM["flipped"][0](tmp_path / "runs" / RUN / "step-00000008")
    assert say("export", tmp_path / "runs", out, "--overwrite")[0] == 1
    found = loaded(open_files(out.rpartition("/")[0]).read("w.safetensors"))
    assert same(found, weights(made.state(4)))
    assert beside(out) == ["w.safetensors"]


def test_name_taken_concurrently(
    out: str, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that appears while this one is written stays unchanged."""
    made.run(tmp_path / "runs", made.state(4))
    stock = export_file.write_safetensors

    def write(*given: Any) -> None:
        stock(*given)
        open_files(out.rpartition("/")[0]).create("w.safetensors", [b"another's"])

    monkeypatch.setattr(export_file, "write_safetensors", write)
    assert say("export", tmp_path / "runs", out)[0] == 2
    assert open_files(out.rpartition("/")[0]).read("w.safetensors") == b"another's"
    assert beside(out) == ["w.safetensors"]


def test_full_disk(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, no part of the file remains."""
    made.run(tmp_path / "runs", made.state(4))

    def write(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export_file, "write_safetensors", write)
    code, printed = say("export", tmp_path / "runs", tmp_path / "w.safetensors")
    assert code == 1
    assert "could not be written: [Errno 28]" in printed
    assert os.listdir(tmp_path) == ["runs"]


@pytest.mark.parametrize(
    "name", ["", "none/w.safetensors", "memory://w.safetensors", "memory://a/"]
)
def test_no_place(name: str, tmp_path: Path, say: Say) -> None:
    """A folder is not accepted as the file, and a missing folder is not created."""
    made.run(tmp_path / "runs", made.state(4))
    out = name if "://" in name else tmp_path / name
    code, printed = say("export", tmp_path / "runs", out, "--format", "safetensors")
    assert code == 2
    assert "file in a folder" in printed


def test_permissions(tmp_path: Path, ask: Ask) -> None:
    """The file has the usual permissions of this user's files."""
    made.run(tmp_path / "runs", made.state(4))
    ask("export", tmp_path / "runs", tmp_path / "w.safetensors")
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("w.safetensors", "other")}
    assert len(modes) == 1


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets its name once its bytes have reached the disk."""
    done = []
    for name in ("publish", "sync_folder"):
        stock = getattr(target, name)

        def noted(*given: Any, name: str = name, stock: Any = stock, **named: Any) -> None:
            done.append(name)
            stock(*given, **named)

        monkeypatch.setattr(target, name, noted)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("fsync"), fsync(number)))
    with target.written(str(tmp_path / "a"), "", overwrite=False) as path:
        path.write_bytes(b"x")
    assert done == ["fsync", "publish", "sync_folder", "fsync"]


@pytest.mark.parametrize("step", [True, 1.5, ["best"]])
def test_bad_step(step: Any) -> None:
    """A step that does not exist is reported."""
    with pytest.raises(ConfigurationError, match="Expected `step`"):
        Export("a.keras", step)
