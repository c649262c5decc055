"""Every path that is printed can be given to every command, and mistyped ones are answered."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import made
from commands.conftest import Ask
from commands.test_goodput_command import write
from storage.checkpoints import RUN

from keras_distplug.cli import main
from keras_distplug.commands import locations
from keras_distplug.core import events
from keras_distplug.storage.files import open_files

Say = Callable[..., tuple[int, str]]
STEP = "step-00000004"
# Paths in the directory of a training, and which run, checkpoint and incident they select.
PATHS: dict[str, tuple[str | None, str | None, str | None]] = {
    "": (None, None, None),
    "/": (None, None, None),
    f"/{RUN}": (RUN, None, None),
    f"/{RUN}/": (RUN, None, None),
    f"/{RUN}/RUN.json": (RUN, None, None),
    f"/{RUN}/MODEL-2.json": (RUN, None, None),
    f"/{RUN}/{STEP}": (RUN, STEP, None),
    f"/{RUN}/{STEP}/MANIFEST.json": (RUN, STEP, None),
    f"/{RUN}/{STEP}/ab-1/rank-0-1.safetensors": (RUN, STEP, None),
    f"/{RUN}/log": (RUN, None, None),
    f"/{RUN}/log/20261122T101112Z-worker-0-3f0c9a1b.jsonl": (RUN, None, None),
    "/log": (None, None, None),
    "/incidents": (None, None, None),
    "/incidents/a.safetensors": (None, None, "a.safetensors"),
    "/hangs/20261122T101112Z-worker-1.txt": (None, None, None),
}


@pytest.mark.parametrize("path", PATHS)
def test_paths(path: str, directory: str) -> None:
    """Every path selects the right run and checkpoint, on a disk and in a store."""
    made.run(directory, made.state(4))
    found = locations.find(f"{directory}{path}")
    assert found.files.where().rstrip("/") == open_files(directory).where().rstrip("/")
    assert (found.run, found.checkpoint, found.incident) == PATHS[path]
    assert not found.is_copy


@pytest.mark.parametrize("name", [RUN, "log", STEP])
def test_directories_with_our_names(name: str, directory: str) -> None:
    """The directory of a training may have the name of one of its folders."""
    made.run(f"{directory}/{name}", made.state(4))
    found = locations.find(f"{directory}/{name}")
    assert found.files.where() == open_files(f"{directory}/{name}").where()
    assert (found.run, found.checkpoint) == (None, None)


@pytest.mark.parametrize("command", ["ls", "show", "verify", "export", "goodput", "report"])
def test_commands(command: str, tmp_path: Path, say: Say) -> None:
    """Every command accepts the folder of a run, of a checkpoint and of a log."""
    made.run(tmp_path, made.state(4), made.state(8))
    now = time.time()
    began = events.Began("a", 0, 1, 1, "host", 1, "Strategy", 9, 0)
    write(tmp_path / RUN, "one", (now, began), (now + 1, events.Window(8, 8, 0, {"step": 1.0})))
    out = {"export": [tmp_path / "x.safetensors", "--overwrite"]}.get(command, [])
    if command == "report":
        out = ["-o", tmp_path / "x.html", "--overwrite"]
    for path in (RUN, f"{RUN}/{STEP}", f"{RUN}/log", f"{RUN}/log/one.jsonl"):
        code, printed = say(command, tmp_path / path, *out)
        assert code == 0, printed
        if path.endswith(STEP) and command not in ("goodput", "report"):
            assert STEP in printed
            assert "step-00000008" not in printed


def test_prune_takes_runs(tmp_path: Path, say: Say) -> None:
    """`prune` accepts a run. A single checkpoint is refused: its options choose what stays."""
    made.run(tmp_path, *(made.state(step) for step in (4, 8, 12)))
    code, printed = say("prune", tmp_path / RUN / STEP, "--keep-last", "1")
    assert code == 2
    assert f"Received: the checkpoint {STEP}. Pass {tmp_path / RUN}" in printed
    assert (tmp_path / RUN / STEP).exists()
    assert say("prune", tmp_path / RUN, "--keep-last", "1")[0] == 0
    assert not (tmp_path / RUN / STEP).exists()


def test_names_with_their_run(tmp_path: Path, ask: Ask) -> None:
    """`show` and `--step` accept the name as `verify` prints it, and a whole path."""
    made.run(tmp_path, made.state(4), made.state(8))
    for name in (f"{RUN}/{STEP}", f"{tmp_path}/{RUN}/{STEP}"):
        assert ask("show", tmp_path, name)[1]["name"] == STEP
        assert [
            each["name"] for each in ask("verify", tmp_path, "--step", name)[1]["findings"]
        ] == [STEP]


def test_copies(tmp_path: Path, ask: Ask, say: Say) -> None:
    """A checkpoint outside a run, such as one of a local tier or of a backup, can be read."""
    made.run(tmp_path / "runs", made.state(4), made.state(8))
    (tmp_path / "backup").mkdir()
    copy = tmp_path / "backup" / STEP
    (tmp_path / "runs" / RUN / STEP).rename(copy)
    assert ask("show", copy)[1]["step"] == 4
    code, told = ask("verify", copy, "--deep")
    assert (code, told["whole"], told["damaged"]) == (0, 1, 0)
    code, printed = say("ls", copy)
    assert code == 0
    assert STEP in printed
    assert "RUN.json" not in printed
    assert ask("export", copy, tmp_path / "x.safetensors")[0] == 0


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (
            RUN,
            ("--run", "run-0002"),
            f"the run {RUN}, but another argument asks",
        ),
        (
            f"{RUN}/{STEP}",
            ("--step", "8"),
            f"the checkpoint {STEP}, but another",
        ),
    ],
)
def test_contradictions(path: str, options: Any, message: str, tmp_path: Path, say: Say) -> None:
    """A path and an option that contradict each other are refused."""
    made.run(tmp_path, made.state(4), made.state(8))
    code, printed = say("verify", tmp_path / path, *options)
    assert code == 2
    assert message in printed
    same = ("--run", RUN, "--step", "4")
    assert say("verify", tmp_path / RUN / STEP, *same)[0] == 0


# Mistyped paths, commands and options


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_near_miss(command: str, directory: str, say: Say) -> None:
    """A path that does not exist is answered with the most similar one."""
    made.run(f"{directory}/mnist", made.state(4))
    code, printed = say(command, f"{directory}/mnits")
    assert code == 3
    where = open_files(f"{directory}/mnist").where().rstrip("/")
    assert f"does not exist or contains no runs. Did you mean {where}?" in printed


def test_no_near_miss(tmp_path: Path, say: Say) -> None:
    """A path that resembles none is answered with what to give."""
    (tmp_path / "data").mkdir()
    code, printed = say("ls", tmp_path / "runs")
    assert code == 3
    assert "Pass the directory of a training" in printed


@pytest.mark.parametrize("command", ["show", "verify", "prune"])
def test_several_trainings(command: str, directory: str, say: Say) -> None:
    """A command for one training names those in a folder of several."""
    for name in ("cifar", "mnist"):
        made.run(f"{directory}/{name}", made.state(4))
    code, printed = say(command, directory)
    assert code == 3
    assert "these of its subfolders do: cifar, mnist. Pass one of them, such as" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lss", "runs"), "there is no command 'lss'. Did you mean `ls`?"),
        (("verfy", "runs"), "Did you mean `verify`?"),
        (("frobnicate",), "there is no command 'frobnicate'. Commands: run, ls, show"),
        (("verify", "runs", "--depe"), "unrecognized arguments: --depe. Did you mean --deep?"),
        (("prune", "runs", "--keep-lsat=1"), "Did you mean --keep-last?"),
        (("run", "--worker-s", "2", "--", "x"), "Did you mean --workers?"),
        (("ls", "runs", "--frobnicate"), "unrecognized arguments: --frobnicate"),
    ],
)
def test_mistyped(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mistyped commands and options are answered with the nearest one, if one is near."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# Folders with several trainings


def test_trainings(directory: str, ask: Ask, say: Say) -> None:
    """`ls` of a folder with several trainings has one line per training."""
    made.run(f"{directory}/mnist", made.state(4), made.final(8))
    made.run(f"{directory}/deep/er/cifar", made.state(4))
    made.run(f"{directory}/new")
    code, told = ask("ls", directory)
    assert code == 0
    cifar, mnist, new = told["trainings"]
    assert [each["name"] for each in told["trainings"]] == ["deep/er/cifar", "mnist", "new"]
    where = open_files(directory).where()
    assert cifar["directory"] == f"{where.rstrip('/')}/deep/er/cifar"
    assert (cifar["run"], cifar["state"], cifar["step"], cifar["epoch"]) == (RUN, "stopped", 4, 1)
    assert (mnist["state"], mnist["step"], mnist["checkpoints"]) == ("finished", 8, 2)
    assert mnist["bytes"] == 2 * cifar["bytes"] > 0
    assert abs(mnist["changed_at"] - time.time()) < 60
    assert (new["state"], new["step"], new["changed_at"]) == ("no checkpoint", 0, None)
    code, printed = say("ls", directory)
    assert code == 0
    # The title wraps, as the path of a temporary folder may be long.
    assert "".join(printed.split()).startswith("".join(f"Training jobs in {where}".split()))
    assert re.search(r"(?m)^mnist +finished +8 +2 +1 +2 +\S+ \w?B +\d+ s ago", printed)
    assert "3 training jobs, " in printed


def test_state_of_log(tmp_path: Path, ask: Ask) -> None:
    """The state and the last step of a training that has a log are those of the log."""
    made.run(tmp_path / "mnist", made.state(4))
    made.run(tmp_path / "cifar", made.state(4))
    now = time.time()
    began = events.Began("a", 0, 1, 1, "host", 1, "Strategy", 9, 0)
    window = (now, events.Window(9, 9, 0, {"step": 1.0}))
    write(tmp_path / "mnist" / RUN, "one", (now - 1, began), window)
    raised = (now, events.Raised("ValueError: no"))
    write(tmp_path / "cifar" / RUN, "one", (now - 1, began), window, raised)
    found = ask("ls", tmp_path)[1]["trainings"]
    assert [(each["name"], each["state"], each["step"]) for each in found] == [
        ("cifar", "dead", 9),
        ("mnist", "training", 9),
    ]


def test_unreadable_training(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that cannot be read hides no other one."""
    made.run(tmp_path / "a", made.state(4))
    made.run(tmp_path / "b", made.state(4))
    stock = locations.survey.survey_run

    def survey_run(files: Any, run: str, *depth: Any) -> Any:
        if files.where().endswith("/a"):
            raise OSError("the disk is on fire")
        return stock(files, run, *depth)

    monkeypatch.setattr(locations.survey, "survey_run", survey_run)
    found = ask("ls", tmp_path)[1]["trainings"]
    assert [(each["name"], each["state"]) for each in found] == [
        ("a", "unreadable: the disk is on fire"),
        ("b", "stopped"),
    ]


@pytest.mark.parametrize("command", ["goodput", "report"])
def test_logs_of_several_trainings(command: str, tmp_path: Path, say: Say) -> None:
    """`goodput` and `report` cover the runs of all trainings in a folder."""
    now = time.time()
    for name in ("cifar", "mnist"):
        made.run(tmp_path / name, made.state(4))
        began = events.Began("a", 0, 1, 1, "host", 1, "Strategy", 9, 0)
        window = (now + 1, events.Window(8, 8, 0, {"step": 1.0}))
        write(tmp_path / name / RUN, "one", (now, began), window)
    out = () if command == "goodput" else ("-o", tmp_path / "x.html")
    code, printed = say(command, tmp_path, *out)
    assert code == 0
    text = printed if command == "goodput" else (tmp_path / "x.html").read_text()
    assert f"cifar/{RUN}" in text
    assert f"mnist/{RUN}" in text
