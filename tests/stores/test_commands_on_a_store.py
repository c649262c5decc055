"""The command line on directories in real stores."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import made
from storage.checkpoints import RUN
from stores.conftest import Started
from stores.servers import Place

from keras_distplug.cli import main
from keras_distplug.storage.files import open_files
from keras_distplug.storage.stores.object_store import MemoryStore
from keras_distplug.storage.stores.remote import RemoteFiles

pytestmark = [pytest.mark.stores, pytest.mark.timeout(300)]

REMOTE = ("memory", "moto", "sftp")


@pytest.fixture(params=REMOTE)
def place(request: pytest.FixtureRequest, stores: Started) -> Place:
    return stores[request.param]


def test_commands(place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Commands work in a store as in a folder."""
    options = ("--storage-options", json.dumps(dict(place.options)), "--json")

    def ask(command: str, *arguments: str) -> Any:
        code = main([command, place.url, *arguments, *options])
        return code, json.loads(capsys.readouterr().out)

    files = open_files(place.url, place.options)
    made.run(files, *(made.state(step) for step in (4, 8, 12)))
    code, told = ask("ls")
    assert code == 0
    assert [each["state"] for each in told["runs"][0]["checkpoints"]] == ["committed"] * 3
    assert ask("show")[1]["name"] == "step-00000012"
    code, told = ask("verify", "--deep")
    assert (code, told["whole"]) == (0, 3)
    code, told = ask("prune", "--keep-last", "1")
    assert [each["name"] for each in told["deleted"]] == ["step-00000004", "step-00000008"]
    assert files.names(RUN) == ["RUN.json", "step-00000012"]

    here, there = tmp_path / "w.safetensors", f"{place.url}/out/w.safetensors"
    assert ask("export", str(here))[0] == 0
    assert ask("export", there)[0] == 0
    assert files.read("out/w.safetensors") == here.read_bytes()
    assert files.names("out") == ["w.safetensors"]

    folder = f"{RUN}/step-00000012"
    (attempt,) = [name for name in files.names(folder) if "." not in name]
    files.delete(f"{folder}/{attempt}/rank-0-1.safetensors")
    code, told = ask("verify")
    assert (code, told["damaged"]) == (1, 1)


def test_options_of_the_store_of_the_file(stores: Started, tmp_path: Path) -> None:
    """When exporting from a folder to a store, the options apply to the store."""
    place = stores["moto"]
    made.run(tmp_path, made.state(4))
    out = f"{place.url}/w.safetensors"
    options = ("--storage-options", json.dumps(dict(place.options)))
    assert main(["export", str(tmp_path), out, *options]) == 0
    assert open_files(place.url, place.options).names() == ["w.safetensors"]


@pytest.mark.parametrize("size", [0, 1000, 120 * 2**20], ids=str)
def test_put(place: Place, size: int, tmp_path: Path) -> None:
    """A large file is put as a whole, with as many requests as necessary, and exclusively if
    requested."""
    files = open_files(place.url, place.options)
    source, other = tmp_path / "source", tmp_path / "other"
    source.write_bytes(os.urandom(size))
    other.write_bytes(b"other")
    files.put(source, "a/out", overwrite=False)
    with pytest.raises(FileExistsError):
        files.put(other, "a/out", overwrite=False)
    assert files.size("a/out") == size
    assert files.read("a/out") == source.read_bytes()
    files.put(other, "a/out", overwrite=True)
    assert files.read("a/out") == b"other"
    assert files.size("a/out") == 5
    assert files.names("a") == ["out"]


def test_time_for_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with the size of three requests has three times the timeout."""
    given = []
    monkeypatch.setattr(MemoryStore, "put", lambda _, fs, *__: given.append(fs._timeout_s))
    source = tmp_path / "source"
    source.touch()
    files = RemoteFiles(MemoryStore(), "memory://any", {}, timeout_s=2.0)
    for size in (0, 70 * 2**20):
        os.truncate(source, size)
        files.put(source, "a", overwrite=False)
    assert given == [2.0, 6.0]
