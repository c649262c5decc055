"""`ls`, `show` and `verify` describe a directory, and change nothing in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import made
from commands.conftest import Ask
from storage.checkpoints import RUN
from support.cluster import environment

from keras_distplug.cli import main
from keras_distplug.core.errors import CheckpointError
from keras_distplug.core.state import Completion
from keras_distplug.storage import layout, survey
from keras_distplug.storage.files import open_files
from keras_distplug.storage.manifest import SCHEMA_VERSION
from keras_distplug.storage.sealed import compute_digest
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.stores.local import LocalFiles

Say = Callable[..., tuple[int, str]]
LOOKING = (("ls",), ("show",), ("verify",), ("verify", "--deep"), ("prune", "--dry-run"))


def states(document: Any) -> dict[str, str]:
    return {each["name"]: each["state"] for each in document["runs"][0]["checkpoints"]}


def taken(document: Any) -> dict[str, str]:
    return {
        each["name"]: each["taken_by"]
        for run in document["runs"]
        for each in run["checkpoints"]
        if each["taken_by"] is not None
    }


# ls


def test_ls(directory: str, ask: Ask) -> None:
    """Every checkpoint is listed with the contents of its manifest, the oldest first."""
    made.run(directory, made.state(4, 0.25), made.state(6))
    code, told = ask("ls", directory)
    assert code == 0
    assert told["directory"] == open_files(directory).where()
    (run,) = told["runs"]
    assert (run["name"], run["is_taken"], run["reason"]) == (RUN, True, None)
    first, last = run["checkpoints"]
    created = first.pop("created_utc")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\+00:00", created)
    assert first == {
        "name": "step-00000004", "kind": "step", "state": "committed", "reason": None, "step": 4,
        "epoch": 1, "batch": 0, "bytes": first["bytes"], "workers": 1,
        "metrics": {"loss": 0.25, "val_loss": 0.25}, "taken_by": None,
    }  # fmt: skip
    files = open_files(directory)
    folder = f"{RUN}/step-00000004"
    (attempt,) = [name for name in files.names(folder) if "." not in name]
    assert first["bytes"] == files.size(f"{folder}/{attempt}/rank-0-1.safetensors")
    assert (last["name"], last["epoch"], last["batch"]) == ("step-00000006", 1, 2)
    assert last["taken_by"] == "any epochs"


def test_ls_for_people(directory: str, say: Say) -> None:
    """The table shows the same; in a pipe, its lines are not broken."""
    made.run(directory, made.state(4, 0.25), made.final(8))
    made.cut_off(directory, "step-00000009")
    code, printed = say("ls", directory)
    assert code == 0
    assert re.search(f"^{RUN}, started 20.*, finished *$", printed, re.MULTILINE)
    assert re.search(r"step-00000004 +committed +4 +1 +0 +20.* B +1 +0\.25 +0\.25", printed)
    assert re.search(r"final-00000008 +committed .*any epochs", printed)
    assert re.search(r"step-00000009 +unfinished +9 +100 B", printed)
    assert "3 checkpoints" in printed


def test_many_metrics(tmp_path: Path, say: Say) -> None:
    """With many metrics, a line shows only the losses."""
    metrics = {"loss": 1.0, "val_loss": 2.0, **{f"metric_{each}": 3.0 for each in range(9)}}
    made.run(tmp_path, made.state(4, metrics=metrics))
    _, printed = say("ls", tmp_path)
    assert "val_loss" in printed
    assert "metric_" not in printed


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ([made.state(4), made.state(8)], {"step-00000008": "any epochs"}),
        (
            [made.state(8), made.final(8)],
            {"final-00000008": "epochs <= 2", "step-00000008": "epochs > 2"},
        ),
        ([made.state(4), made.final(8)], {"final-00000008": "any epochs"}),
        (
            [made.final(8), made.state(12)],
            {"final-00000008": "epochs <= 2", "step-00000012": "epochs > 2"},
        ),
    ],
)
def test_resumed_checkpoint(
    saved: list[Any], expected: dict[str, str], tmp_path: Path, ask: Ask
) -> None:
    """The checkpoint that a `fit` would resume from is marked, with the `epochs` of that `fit`."""
    made.run(tmp_path, *saved)
    assert taken(ask("ls", tmp_path)[1]) == expected


def test_several_runs(directory: str, ask: Ask) -> None:
    """All runs are listed, or the selected one. Training resumes the newest run with a
    checkpoint."""
    made.run(directory, made.state(4))
    made.run(directory, made.state(8), name="run-0002")
    made.run(directory, name="run-0003")
    _, told = ask("ls", directory)
    assert [(run["name"], run["is_taken"]) for run in told["runs"]] == [
        ("run-0001", False), ("run-0002", True), ("run-0003", False),
    ]  # fmt: skip
    assert taken(told) == {"step-00000008": "any epochs"}
    _, told = ask("ls", directory, "--run", "run-0001")
    assert [run["name"] for run in told["runs"]] == ["run-0001"]
    assert taken(told) == {}


def test_interrupted_saves(directory: str, ask: Ask) -> None:
    """An interrupted save is distinguished from one that may be in progress."""
    made.run(directory, made.state(4), made.state(8))
    made.cut_off(directory, "step-00000006")
    made.cut_off(directory, "step-00000010")
    made.cut_off(directory, "final-00000006")
    _, told = ask("ls", directory)
    assert states(told) == {
        "step-00000004": "committed", "step-00000006": "cut off", "final-00000006": "unfinished",
        "step-00000008": "committed", "step-00000010": "unfinished",
    }  # fmt: skip
    assert [each["bytes"] for each in told["runs"][0]["checkpoints"]][1] == 100


@pytest.mark.parametrize("harm", ["manifest", "half a manifest", "set aside"])
def test_damaged(harm: str, tmp_path: Path, ask: Ask, say: Say) -> None:
    """A checkpoint with a damaged manifest, or a quarantined one, is named with the reason, and
    training does not resume from it."""
    made.run(tmp_path, made.state(4), made.state(8))
    do, reason, _ = made.HARM[harm]
    do(tmp_path / RUN / "step-00000008")
    code, told = ask("ls", tmp_path)
    assert code == 0
    assert states(told) == {"step-00000004": "committed", "step-00000008": "damaged"}
    assert re.search(reason, told["runs"][0]["checkpoints"][1]["reason"])
    assert taken(told) == {"step-00000004": "any epochs"}
    assert re.search(f"step-00000008 is damaged: .*{reason}", say("ls", tmp_path)[1])


def test_all_damaged(tmp_path: Path, ask: Ask) -> None:
    """If all checkpoints are damaged, a `fit` resumes from none of them: it raises an error."""
    made.run(tmp_path, made.state(4))
    made.HARM["manifest"][0](tmp_path / RUN / "step-00000004")
    assert taken(ask("ls", tmp_path)[1]) == {}


def test_damaged_record(tmp_path: Path, ask: Ask) -> None:
    """A run whose record is damaged or missing is listed as one that is not resumed."""
    made.run(tmp_path, made.state(4))
    record = tmp_path / RUN / "RUN.json"
    record.write_text(record.read_text().replace('"seed": 0', '"seed": 1'))
    code, told = ask("ls", tmp_path)
    assert (code, told["runs"][0]["is_taken"]) == (0, False)
    assert "RUN.json is damaged" in told["runs"][0]["reason"]
    assert taken(told) == {}
    record.unlink()
    assert "RUN.json" in ask("ls", tmp_path)[1]["runs"][0]["reason"]


def test_no_json_numbers(tmp_path: Path, ask: Ask) -> None:
    """Numbers that JSON lacks are null."""
    made.run(tmp_path, made.state(4, float("nan")))
    assert ask("ls", tmp_path)[1]["runs"][0]["checkpoints"][0]["metrics"]["val_loss"] is None


def test_training_cleans_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is deleted while a command runs is skipped, and is not damage."""
    kept = made.run(tmp_path, made.state(4), made.state(8))
    stock, cleaned = LocalFiles.read, []

    def read(self: Any, path: str) -> bytes:
        if "step-00000004" in path and not cleaned:
            cleaned.append(path)
            kept.delete("step-00000004", "MANIFEST.json")
            kept.delete("step-00000004")
        return stock(self, path)

    monkeypatch.setattr(LocalFiles, "read", read)
    found = survey.survey_run(open_files(tmp_path), RUN, survey.Depth.BYTES)
    assert cleaned
    assert [(each.name, each.state) for each in found.checkpoints] == [
        ("step-00000008", "committed")
    ]


# show


def test_show(directory: str, ask: Ask, say: Say) -> None:
    """By default, the newest checkpoint is shown in full."""
    made.run(directory, made.state(4), made.state(6))
    code, told = ask("show", directory)
    assert code == 0
    assert (told["run"], told["name"], told["taken_by"]) == (RUN, "step-00000006", "any epochs")
    assert told["history"] == {"loss": [2.0, 1 / 6]}
    assert told["variables"] == [
        {"key": "model/dense/kernel", "shape": [3, 4], "dtype": "float32", "bytes": 48},
        {"key": "model/dense/bias", "shape": [4], "dtype": "bfloat16", "bytes": 8},
        {"key": "optimizer/iteration", "shape": [], "dtype": "int64", "bytes": 8},
        {"key": "random/global_seed_generator", "shape": [2], "dtype": "uint32", "bytes": 8},
    ]
    assert sum(each["bytes"] for each in told["files"]) == told["bytes"]
    assert told["completion"] is None
    code, printed = say("show", directory)
    assert code == 0
    for expected in (
        r"epoch +1 done, and 2 batches\b", r"last history +loss 0\.1667\b", r"rank-0-1\.safetens",
        r"model/dense/kernel +\[3, 4\] +float32 +48 B", r"model: 2 variables, 56 B", "keras 3",
    ):  # fmt: skip
        assert re.search(expected, printed), printed


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("step-00000004",), "step-00000004"),
        (("--step", "4"), "step-00000004"),
        (("--step", "8"), "step-00000008-2"),
        (("final-00000008",), "final-00000008"),
        ((), "final-00000008"),
        (("--run", "run-0002"), "step-00000012"),
    ],
)
def test_selected_checkpoint(
    asked: tuple[str, ...], expected: str, tmp_path: Path, ask: Ask
) -> None:
    """A checkpoint can be selected by step, by name, and in another run."""
    saved = [made.state(4), made.state(8), made.state(8), made.final(8)]
    made.run(tmp_path, *saved)
    made.run(tmp_path, made.state(12), name="run-0002")
    arguments = asked if "--run" in asked else (*asked, "--run", RUN)
    assert ask("show", tmp_path, *arguments)[1]["name"] == expected


def test_show_end(tmp_path: Path, ask: Ask, say: Say) -> None:
    """The final checkpoint shows how the run ended."""
    end = Completion(epochs=5, stopped_early=True)
    made.run(tmp_path, made.state(8, completion=end))
    assert ask("show", tmp_path)[1]["completion"] == {"epochs": 5, "stopped_early": True}
    assert re.search("end +of 5 epochs, stopped early", say("show", tmp_path)[1])


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (
            ("--step", "5"),
            3,
            r"no complete checkpoint 5\. Complete checkpoints: step-00000004",
        ),
        (("--run", "run-0007"), 3, "contains no run 'run-0007'. Its runs: run-0001"),
        (("step-00000008",), 1, "step-00000008 is damaged: a bit fell over"),
        (("step-00000004", "--step", "4"), 2, "Give a name or a step, not both"),
    ],
)
def test_refused_checkpoints(
    asked: tuple[str, ...], code: int, message: str, tmp_path: Path, say: Say
) -> None:
    """A missing or damaged checkpoint is an error that lists the existing ones."""
    made.run(tmp_path, made.state(4), made.state(8))
    made.HARM["set aside"][0](tmp_path / RUN / "step-00000008")
    found, printed = say("show", tmp_path, *asked)
    assert found == code
    assert re.search(message, printed), printed


# verify


def test_verify_intact(directory: str, ask: Ask, say: Say) -> None:
    """Intact checkpoints are reported as such; the rest of an interrupted save is not damage."""
    made.run(directory, made.state(4), made.state(8), made.final(8))
    made.cut_off(directory, "step-00000006")
    for deep in ((), ("--deep",)):
        code, told = ask("verify", directory, *deep)
        assert (code, told["whole"], told["damaged"]) == (0, 3, 0)
        assert told["deep"] == bool(deep)
        sound = "whole" if deep else "sizes match"
        assert [(each["name"], each["state"]) for each in told["findings"]] == [
            ("step-00000004", sound), ("step-00000006", "cut off"), ("step-00000008", sound),
            ("final-00000008", sound),
        ]  # fmt: skip
    assert "3 checkpoints of the right size" in say("verify", directory)[1]
    assert "3 checkpoints intact; damaged or unreadable: 0" in say("verify", directory, "--deep")[1]


@pytest.mark.parametrize("harm", made.HARM)
def test_verify_damage(harm: str, tmp_path: Path, ask: Ask, say: Say) -> None:
    """Every kind of damage is found and named; a flipped bit only with --deep."""
    made.run(tmp_path, made.state(4), made.state(8))
    do, reason, is_seen_by_size = made.HARM[harm]
    do(tmp_path / RUN / "step-00000004")
    for deep in ((), ("--deep",)):
        code, told = ask("verify", tmp_path, *deep)
        is_seen = is_seen_by_size or bool(deep)
        assert (code, told["damaged"], told["whole"]) == ((1, 1, 1) if is_seen else (0, 0, 2))
        first = told["findings"][0]
        assert first["state"] == ("damaged" if is_seen else "sizes match")
        assert not is_seen or re.search(reason, first["reason"])
    code, printed = say("verify", tmp_path, "--deep")
    assert code == 1
    assert re.search(f"(?m)^{RUN}/step-00000004: damaged, .*({reason})", printed)
    assert re.search(rf"(?m)^{RUN}/step-00000008: intact, \d+ B$", printed)


def test_verify_some(tmp_path: Path, ask: Ask) -> None:
    """Only the selected checkpoints are checked."""
    made.run(tmp_path, made.state(4), made.state(8))
    made.HARM["missing"][0](tmp_path / RUN / "step-00000004")
    assert ask("verify", tmp_path, "--step", "8")[0] == 0
    assert ask("verify", tmp_path, "--step", "step-00000004")[0] == 1
    made.run(tmp_path, made.state(12), name="run-0002")
    code, told = ask("verify", tmp_path, "--run", "run-0002")
    assert (code, told["whole"]) == (0, 1)
    assert ask("verify", tmp_path, "--step", "5")[0] == 3


@pytest.mark.parametrize("name", ["RUN.json", "MODEL.json"])
def test_verify_records(name: str, tmp_path: Path, ask: Ask) -> None:
    """The other files of a run are verified, too."""
    made.run(tmp_path, made.state(4))
    (tmp_path / RUN / name).write_text("{}")
    code, told = ask("verify", tmp_path)
    assert (code, told["findings"][0]["name"]) == (1, name)
    assert f"{name} is damaged" in told["findings"][0]["reason"]


def test_another_release(tmp_path: Path, ask: Ask) -> None:
    """A checkpoint that another release wrote is unreadable, not damaged."""
    made.run(tmp_path, made.state(4))
    manifest = tmp_path / RUN / "step-00000004" / "MANIFEST.json"
    body = json.loads(manifest.read_text())
    del body["sha256"]
    body["schema_version"] = SCHEMA_VERSION + 1
    manifest.write_text(json.dumps({**body, "sha256": compute_digest(body)}))
    code, told = ask("verify", tmp_path)
    assert (code, told["findings"][0]["state"]) == (1, "unreadable")
    assert "schema version" in told["findings"][0]["reason"]
    assert states(ask("ls", tmp_path)[1]) == {"step-00000004": "unreadable"}


# All of them


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_nothing_is_changed(command: tuple[str, ...], tmp_path: Path) -> None:
    """Read-only commands write and delete nothing, whatever they find."""
    made.run(tmp_path, *(made.state(step) for step in range(4, 36, 4)), made.final(36))
    for step, (do, _, _) in zip(range(4, 32, 4), made.HARM.values(), strict=True):
        do(tmp_path / RUN / f"step-{step:08d}")
    made.cut_off(tmp_path, "step-00000005")
    before = made.contents(tmp_path)
    main([command[0], str(tmp_path), *command[1:]])
    assert made.contents(tmp_path) == before


@pytest.mark.parametrize("command", [*LOOKING, ("export", "x.safetensors")], ids=" ".join)
@pytest.mark.parametrize("kind", ["missing", "empty", "other", "store"])
def test_no_run_yet(command: tuple[str, ...], kind: str, tmp_path: Path, say: Say) -> None:
    """A directory without a run has its own exit code, and is not created."""
    place = tmp_path / "runs"
    if kind != "missing":
        place.mkdir()
    if kind == "other":
        (place / "train.py").touch()
    directory = "memory://nothing-is-here" if kind == "store" else place
    code, printed = say(command[0], directory, *command[1:])
    assert code == 3
    assert f"error: {open_files(directory).where()} does not exist or contains no runs" in printed
    assert place.exists() == (kind != "missing")


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_no_checkpoint(command: str, directory: str, say: Say, tmp_path: Path) -> None:
    """A run that has only started holds nothing either."""
    made.run(directory)
    out = (tmp_path / "x.safetensors",) if command == "export" else ()
    code, printed = say(command, directory, *out)
    assert code == 3
    assert "no complete checkpoint" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls",), "DIRECTORY"),
        (("ls", "a", "--storage-options", "[1]"), "expected a JSON object. Received: the JSON"),
        (("ls", "a", "--storage-options", "{"), "expected a JSON object, or @FILE"),
        (("ls", "a", "--storage-options", "@none"), "No such file"),
        (("ls", "a", "--storage-options", '{"a": 1}'), "only with the URL of a store"),
        (("ls", "nothing://a"), "Expected a path, or a URL"),
        (("ls", __file__), "is a file"),
        (("ls", "a", "--", "b"), "takes no command after `--`"),
        (("verify", "a", "--deeper"), "unrecognized arguments"),
        (("prune", "a", "--keep-last", "0"), "`keep_last` to be an integer >= 1"),
        (("prune", "a", "--keep-best", "loss", "best", "1"), "Expected `keep_best`"),
        (("prune", "a", "--keep-best", "loss", "min", "x"), "Expected `keep_best`"),
        (("export", "a", "b.txt"), "endings .keras, .weights.h5, .safetensors"),
        (("export", "a", "b.keras", "--step", "best"), "requires a metric"),
        (("export", "a", "b.keras", "--step", "best", "--metric", "loss"), "go together"),
        (("export", "a", "b.keras", "--metric", "loss", "--mode", "min"), "go together"),
    ],
)
def test_wrong_usage(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong usage is reported, with its exit code."""
    try:
        code: Any = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_storage_options_in_a_file(tmp_path: Path, ask: Ask) -> None:
    """Options may be in a file, so that they do not appear in the list of processes."""
    made.run("memory://options-in-a-file", made.state(4))
    (tmp_path / "options.json").write_text("{}")
    options = f"@{tmp_path / 'options.json'}"
    code, told = ask("ls", "memory://options-in-a-file", "--storage-options", options)
    assert (code, len(told["runs"])) == (0, 1)


def test_unreadable(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that cannot be read is a failure, not an empty directory."""

    def fail(*_: Any) -> Any:
        raise CheckpointError("the disk is on fire")

    monkeypatch.setattr(layout, "runs", fail)
    code, printed = say("ls", tmp_path)
    assert (code, printed) == (1, "keras-distplug ls: error: the disk is on fire\n")


@pytest.mark.parametrize("command", ["", "run", "ls", "show", "verify", "prune", "export"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every help text has an example and the exit codes."""
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert re.search(r"\nExamples?:\n  keras-distplug ", printed)
    assert "\nExit codes: 0 " in printed


@pytest.mark.parametrize("command", [*LOOKING, ("prune",), ("export",)], ids=" ".join)
def test_imports_are_light(command: tuple[str, ...], tmp_path: Path) -> None:
    """These commands load neither TensorFlow nor Keras, and fsspec only for stores."""
    made.run(tmp_path / "runs", *(made.state(step) for step in (4, 8, 12)))
    out = [str(tmp_path / "out.safetensors")] if command == ("export",) else []
    arguments = [command[0], str(tmp_path / "runs"), *out, *command[1:]]
    code = (
        "import sys; from keras_distplug.cli import main; code = main(sys.argv[1:])\n"
        "print(code, sorted({'tensorflow', 'keras', 'fsspec'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_command_as_a_process(tmp_path: Path) -> None:
    """A process has the exit code, and its table is not cut in a pipe."""
    made.run(tmp_path, made.state(4))
    done = subprocess.run(
        [sys.executable, "-m", "keras_distplug", "ls", str(tmp_path)],
        env=environment({"COLUMNS": "40"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("step-00000004 .* any epochs", done.stdout)


def test_store_is_left_alone(tmp_path: Path) -> None:
    """A damaged checkpoint that `newest` of a store would quarantine is left unchanged by `ls`."""
    made.run(tmp_path, made.state(4), made.state(8))
    made.HARM["manifest"][0](tmp_path / RUN / "step-00000008")
    main(["ls", str(tmp_path)])
    assert not list(tmp_path.rglob("DAMAGED.json"))
    with pytest.warns(UserWarning, match="quarantined"):
        CheckpointStore(open_files(tmp_path), RUN).newest("step")
    assert len(list(tmp_path.rglob("DAMAGED.json"))) == 1
