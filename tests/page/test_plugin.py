"""What TensorBoard asks for, and is given: the runs that are there, as they are now."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import logged
from tensorboard.plugins import base_plugin
from werkzeug.test import Client

from keras_distplug.core.events import to_line
from keras_distplug.storage.files import open_files
from keras_distplug.tensorboard_plugin.folders import folders_of
from keras_distplug.tensorboard_plugin.plugin import Loader, Plugin


def plugin(**flags: Any) -> Plugin:
    return Loader().load(base_plugin.TBContext(flags=SimpleNamespace(**flags)))


def get(asked: Plugin, route: str) -> Any:
    response = Client(asked.get_plugin_apps()[route]).get(route)
    assert response.status_code == 200
    return response


def shown(asked: Plugin) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(get(asked, "/runs").get_data())
    return runs


def put(url: Any, run: str, workers: int = 2, windows: int = 10) -> None:
    files = open_files(url)
    fits, supervised, _ = logged.fits(workers, windows)
    logs = {"supervisor-job": supervised}
    logs |= {str(number): list(fit.entries) for number, fit in enumerate(fits)}
    for stem, entries in logs.items():
        files.create(f"{run}/log/{stem}.jsonl", list(map(to_line, entries)))


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_runs(kind: str, tmp_path: Path) -> None:
    """Those of a directory, or of several in a folder, each by its way there."""
    root = str(tmp_path) if kind == "local" else f"memory://{uuid.uuid4().hex}"
    asked = plugin(logdir=root, logdir_spec="")
    assert not asked.is_active()
    put(root, "mnist/run-0001")
    put(root, "mnist/run-0002")
    put(root, "cifar/large/run-0001")
    assert asked.is_active()
    runs = shown(asked)
    assert sorted(run["name"] for run in runs) == [
        "cifar/large/run-0001",
        "mnist/run-0001",
        "mnist/run-0002",
    ]
    assert {run["state"] for run in runs} == {"finished"}
    assert [run["name"] for run in shown(plugin(logdir=f"{root}/mnist", logdir_spec=""))] == [
        "run-0001",
        "run-0002",
    ]
    [run] = shown(plugin(logdir=f"{root}/mnist/run-0001", logdir_spec=""))
    assert run["name"] == ""


def test_news(tmp_path: Path) -> None:
    """A line that comes while TensorBoard runs is there the next time; one under way is not."""
    put(tmp_path, "run-0001", workers=1)
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    [before] = shown(asked)
    assert shown(asked) == [before]
    fits, _, _ = logged.fits(1, 20)
    news = [to_line(entry) for entry in fits[1].entries[-10:-1]]
    path = tmp_path / "run-0001" / "log" / "1.jsonl"
    with open(path, "ab") as file:
        file.write(b"".join(news[:1]) + news[1][:20])
    [half] = shown(asked)
    assert half["step"] > before["step"]
    with open(path, "ab") as file:
        file.write(news[1][20:])
    [whole] = shown(asked)
    assert whole["step"] > half["step"]


def test_module() -> None:
    """One file, that has all it needs, and the name by which TensorBoard calls it."""
    response = get(plugin(logdir="", logdir_spec=""), "/index.js")
    assert response.mimetype == "text/javascript"
    assert "as render" in response.get_data(as_text=True)


def test_folder_that_is_none(tmp_path: Path) -> None:
    """It may come to be there."""
    asked = plugin(logdir=str(tmp_path / "later"), logdir_spec="")
    assert not asked.is_active()
    assert shown(asked) == []
    put(tmp_path / "later", "run-0001")
    assert len(shown(asked)) == 1


def test_run_that_cannot_be_read(tmp_path: Path) -> None:
    """It is shown with what is wrong with it, and the others as they are."""
    for run in ("run-0001", "run-0002", "run-0003"):
        put(tmp_path, run)
    (tmp_path / "run-0002" / "log" / "worker-9.jsonl").mkdir()
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    for _ in range(2):
        first, second, third = shown(asked)
        assert first["state"] == third["state"] == "finished"
        assert second["name"] == "run-0002"
        assert second["error"].startswith("IsADirectoryError: ")


@pytest.mark.parametrize(
    ("flags", "folders"),
    [
        ({"logdir": "runs", "logdir_spec": ""}, {"": "runs"}),
        ({"logdir": "", "logdir_spec": ""}, {}),
        ({"logdir": "", "logdir_spec": "a:runs,/b:c"}, {"a": "runs", "1": "/b:c"}),
        ({"logdir": "", "logdir_spec": "s3://a/b"}, {"0": "s3://a/b"}),
    ],
)
def test_where_to_look(flags: dict[str, str], folders: dict[str, str]) -> None:
    assert folders_of(SimpleNamespace(**flags)) == folders  # type: ignore[arg-type]
