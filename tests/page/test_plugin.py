"""The plugin's responses to TensorBoard: the existing runs, in their current state."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import logged, small
from tensorboard.plugins import base_plugin
from werkzeug.test import Client

import keras_distplug as kd
from keras_distplug.cli import main
from keras_distplug.core.event_lines import to_line
from keras_distplug.runlog import log_files, sinks
from keras_distplug.storage.files import open_files
from keras_distplug.storage.stores.local import LocalFiles
from keras_distplug.tensorboard_plugin import plugin as plugin_module
from keras_distplug.tensorboard_plugin import watched
from keras_distplug.tensorboard_plugin.plugin import Loader, Plugin, list_folders


def plugin(**flags: Any) -> Plugin:
    return Loader().load(base_plugin.TBContext(flags=SimpleNamespace(**flags)))


def get(asked: Plugin, route: str) -> Any:
    response = Client(asked.get_plugin_apps()[route]).get(route)
    assert response.status_code == 200
    return response


def shown(asked: Plugin) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(get(asked, "/runs").get_data())
    return runs


def details(asked: Plugin, name: str) -> dict[str, Any]:
    response = Client(asked.get_plugin_apps()["/run"]).get("/run", query_string={"name": name})
    assert response.status_code == 200
    run: dict[str, Any] = json.loads(response.get_data())
    return run


def put(url: Any, run: str, workers: int = 2, windows: int = 10) -> None:
    files = open_files(url)
    fits, supervised, _ = logged.fits(workers, windows)
    logs = {"supervisor-job": supervised}
    logs |= {str(number): list(fit.entries) for number, fit in enumerate(fits)}
    for stem, entries in logs.items():
        files.create(f"{run}/log/{stem}.jsonl", list(map(to_line, entries)))


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_runs(kind: str, tmp_path: Path) -> None:
    """Runs of one directory, or of several in a folder, are named by their paths."""
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


def test_new_lines(tmp_path: Path) -> None:
    """A line that is written while TensorBoard runs is in the next response once it is complete."""
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


def test_chosen_run(tmp_path: Path) -> None:
    """The details of one run are sent on request; of the others, only their headlines."""
    put(tmp_path, "a/run-0001")
    put(tmp_path, "b/run-0001", workers=4)
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    run = details(asked, "b/run-0001")  # before the list of all runs was requested
    assert len(run["ranking"]) == 4
    first, second = shown(asked)
    assert second == {key: run[key] for key in second}
    assert "heat" not in first
    response = Client(asked.get_plugin_apps()["/run"]).get("/run", query_string={"name": "c"})
    assert response.status_code == 404


def test_unchanged_data_is_not_sent(tmp_path: Path) -> None:
    """Without changes, only the server's time is sent, because the browser's clock may differ."""
    put(tmp_path, "run-0001")
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    fits, _, _ = logged.fits(1, 20)
    for route, news in zip(("/runs", "/run?name=run-0001"), fits[1].entries[-10:-8], strict=True):
        client = Client(asked.get_plugin_apps()[route.partition("?")[0]])
        first = client.get(route)
        assert abs(float(first.headers["X-Now"]) - time.time()) < 60
        again = client.get(route, headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.get_data()) == (304, b"")
        assert float(again.headers["X-Now"]) >= float(first.headers["X-Now"])
        # What TensorBoard 3 will require, and no body.
        assert again.headers["Content-Type"] == "application/json"
        assert again.headers["X-Content-Type-Options"] == "nosniff"
        with open(tmp_path / "run-0001" / "log" / "1.jsonl", "ab") as file:
            file.write(to_line(news))
        third = client.get(route, headers={"If-None-Match": first.headers["ETag"]})
        assert third.status_code == 200
        assert third.headers["ETag"] != first.headers["ETag"]


def test_unchanged_runs_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchanged runs cost no more than listing their files."""
    put(tmp_path, "run-0001")
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    before = shown(asked), details(asked, "run-0001")

    def fail(*given: Any) -> Any:
        raise AssertionError("made anew")

    monkeypatch.setattr(watched, "judged", fail)
    monkeypatch.setattr(watched.survey, "checkpoint_states", fail)
    assert (shown(asked), details(asked, "run-0001")) == before
    now = time.time()
    monkeypatch.setattr(plugin_module, "time", SimpleNamespace(time=lambda: now + 9e9))
    [run] = shown(asked)  # which proves that a failure would be shown
    assert run["error"] == "AssertionError: made anew"


def test_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be listed is shown with its error, and hides no other folder."""
    for folder in ("a", "m", "z"):
        put(tmp_path, f"{folder}/run-0001")
    listed = LocalFiles.names

    def names(self: LocalFiles, folder: str = "") -> list[str]:
        # Tests may run as root, for whom permissions do not apply.
        if folder == "m":
            raise PermissionError(13, "Permission denied", folder)
        return listed(self, folder)

    monkeypatch.setattr(LocalFiles, "names", names)
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    assert asked.is_active()
    first, second, third = shown(asked)
    assert [first["name"], third["name"]] == ["a/run-0001", "z/run-0001"]
    assert second["name"] == "m"
    assert "cannot be listed" in second["error"]


class Counted:
    """Files in a store, with a record of the requests."""

    def __init__(self, files: Any, asked: list[str]) -> None:
        self._files, self._asked = files, asked

    def __getattr__(self, name: str) -> Any:
        if name in ("size", "names", "read_into", "read"):
            self._asked.append(name)
        return getattr(self._files, name)


def test_requests_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh without changes only lists the log's folder."""
    root = f"memory://{uuid.uuid4().hex}"
    asked: list[str] = []
    monkeypatch.setattr(log_files, "open_files", lambda url: Counted(open_files(url), asked))
    files = open_files(root)
    for rank, fit in enumerate(logged.fits(4, 10)[0]):
        sink = sinks.open_sink(files, f"run-0001/log/20260101T000000Z-worker-{rank}-aaaa")
        sink.write(b"".join(map(to_line, fit.entries)))
    watching = plugin(logdir=root, logdir_spec="")
    [run] = shown(watching)
    assert run["attempted"] == 2
    asked.clear()
    assert shown(watching) == [run]
    assert asked == ["names"]


def fitted(where: Path, *more: Any) -> None:
    """Trains briefly, with checkpoints at the end of every epoch."""
    callbacks = [*more, *kd.defaults(where)]
    small.model().fit(small.X, small.Y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    log_files._close_all()


def list_checkpoints(folder: Path) -> list[tuple[str, str | None]]:
    asked = plugin(logdir=str(folder), logdir_spec="")
    [run] = shown(asked)
    rows = details(asked, run["name"])["checkpoints"]
    return [(each["state"], each["verified"]) for each in rows]


@pytest.mark.tf
def test_states_of_checkpoints(tmp_path: Path) -> None:
    """States do not depend on the folder that TensorBoard is given; a truncated file is damage."""
    fitted(tmp_path / "mnist")
    run = tmp_path / "mnist" / "run-0001"
    seen = [list_checkpoints(folder) for folder in (tmp_path, tmp_path / "mnist", run)]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][-1] == ("committed", "sizes")
    assert ("unfinished", None) not in seen[0]
    folders = [each for each in run.glob("*-0*") if each.is_dir()]
    last_step = max(each.name.partition("-")[2] for each in folders)
    damaged = list(run.glob(f"*-{last_step}*/*/*.safetensors"))
    for shard in damaged:
        shard.write_bytes(shard.read_bytes()[:10])
    assert damaged
    for folder in (tmp_path, tmp_path / "mnist", run):
        rows = list_checkpoints(folder)
        assert rows[-1] == ("damaged", None)
        assert ("committed", "sizes") in rows
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    report = (tmp_path / "report.html").read_text()
    told = json.loads(report.partition('id="runs">')[2].partition("</script>")[0])
    assert "damaged" in [each["state"] for each in told["runs"][0]["checkpoints"]]


@pytest.mark.tf
def test_log_apart_from_checkpoints(tmp_path: Path) -> None:
    """If the log is not next to the checkpoints, none of them is verified."""
    fitted(tmp_path / "run", kd.RunLog(tmp_path / "logs"))
    rows = list_checkpoints(tmp_path / "logs")
    assert rows
    assert set(rows) == {("committed", None)}


def test_module() -> None:
    """The tab's module is one file, with the name that TensorBoard requests."""
    response = get(plugin(logdir="", logdir_spec=""), "/index.js")
    assert response.mimetype == "text/javascript"
    assert "as render" in response.get_data(as_text=True)


def test_missing_folder(tmp_path: Path) -> None:
    """A missing folder may be created later."""
    asked = plugin(logdir=str(tmp_path / "later"), logdir_spec="")
    assert not asked.is_active()
    assert shown(asked) == []
    put(tmp_path / "later", "run-0001")
    assert len(shown(asked)) == 1


def test_run_that_cannot_be_read(tmp_path: Path) -> None:
    """A run that cannot be read is shown with its error, and the others are not affected."""
    for run in ("run-0001", "run-0002", "run-0003"):
        put(tmp_path, run)
    log = tmp_path / "run-0002" / "log"
    log.rename(tmp_path / "elsewhere")
    log.symlink_to(tmp_path / "elsewhere")
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    for _ in range(2):
        first, second, third = shown(asked)
        assert first["state"] == third["state"] == "finished"
        assert second["name"] == "run-0002"
        assert "outside of" in second["error"]


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Skipped files and lines are named once, next to the rest of the run."""
    put(tmp_path, "run-0001")
    log = tmp_path / "run-0001" / "log"
    (log / "worker-9.jsonl").mkdir()
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    for _ in range(2):
        shown_one = details(asked, "run-0001")
        assert shown_one["state"] == "finished"
        [note] = shown_one["notes"]
        assert note.startswith(f"{log / 'worker-9.jsonl'} is skipped: ")
    with (log / "0.jsonl").open("ab") as lines:
        lines.write(b'{"v": 1}\n')
    number = len((log / "0.jsonl").read_bytes().splitlines())
    [*_, note] = details(asked, "run-0001")["notes"]
    assert note == f"{log / '0.jsonl'}, line {number} is skipped: field 'event' is missing"


@pytest.mark.parametrize(
    ("flags", "folders"),
    [
        ({"logdir": "runs", "logdir_spec": ""}, {"": "runs"}),
        ({"logdir": "", "logdir_spec": ""}, {}),
        ({"logdir": "", "logdir_spec": "a:runs,/b:c"}, {"a": "runs", "1": "/b:c"}),
        ({"logdir": "", "logdir_spec": "s3://a/b"}, {"0": "s3://a/b"}),
    ],
)
def test_folders_of_the_flags(flags: dict[str, str], folders: dict[str, str]) -> None:
    assert list_folders(SimpleNamespace(**flags)) == folders  # type: ignore[arg-type]


def test_tensorboard_accepts_every_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard's validator of headers, which warns now and will refuse in TensorBoard 3, accepts
    every response."""
    from tensorboard.backend import security_validator

    complaints: list[str] = []
    monkeypatch.setattr(security_validator, "_maybe_raise_value_error", complaints.append)
    put(tmp_path, "run-0001")
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    for route, app in asked.get_plugin_apps().items():
        client = Client(security_validator.SecurityValidatorMiddleware(app))
        first = client.get(route, query_string={"name": "run-0001"})
        version = first.headers.get("ETag", "")
        client.get(route, query_string={"name": "run-0001"}, headers={"If-None-Match": version})
    assert complaints == []


def test_state_changes_without_new_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stops logging is shown as silent, and then as dead."""
    fits, _, _ = logged.fits(1, 10)
    entries = fits[0].entries
    open_files(tmp_path).create("run-0001/log/0.jsonl", list(map(to_line, entries)))
    asked = plugin(logdir=str(tmp_path), logdir_spec="")
    for after, state in ((1.0, "training"), (11.0, "training"), (13.0, "silent"), (61.0, "dead")):
        now = entries[-1].at + after
        monkeypatch.setattr(plugin_module, "time", SimpleNamespace(time=lambda now=now: now))
        [run] = shown(asked)
        assert run["state"] == state
        assert details(asked, "run-0001")["state"] == state
