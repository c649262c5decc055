"""A training that is killed has one run in a tracker, in which steps increase."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import ROOT, environment
from support.needed import is_installed, missing
from support.trackers_files import MlflowFile, wandb_files
from support.watched import Watched
from trackers.recorded import increases

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EXAMPLE = str(ROOT / "examples" / "tracked.py")
TIMEOUT_S = 180  # far more than an attempt takes
KILLS = 3


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Returns an environment with both trackers, and without a server."""
    for module in ("wandb", "mlflow", "alembic", "pandas"):
        if not is_installed(module):
            missing(module, "Run pip install '.[test-trackers]'.")
    return environment(
        {
            "KERAS_HOME": str(tmp_path),
            "WANDB_MODE": "offline",
            "WANDB_ERROR_REPORTING": "false",
            "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
    )


@pytest.fixture
def started() -> Iterator[list[Watched]]:
    processes: list[Watched] = []
    yield processes
    for each in processes:
        each.kill()


def start(env: dict[str, str], folder: Path, started: list[Watched], *arguments: str) -> Watched:
    command = [sys.executable, EXAMPLE, "--tracker", "wandb", "mlflow", *arguments]
    started.append(Watched(command, env, folder))
    return started[-1]


def marked(folder: Path) -> int:
    """Returns the last step that wandb may have received."""
    # Not `**`, which would list the directories of checkpoints while the training deletes them.
    marks = folder.glob("runs/tracked/*/log/trackers/wandb/*.*")
    return max((int(each.stem) for each in marks if each.suffix in (".step", ".epoch")), default=-1)


def epoch_of(printed: str) -> int:
    return int(re.findall(r"Epoch (\d+)/", printed)[-1])


def finish(env: dict[str, str], folder: Path, started: list[Watched], *arguments: str) -> str:
    """Lets the training end soon after where the last process was killed."""
    epochs = epoch_of(started[-1].output) + 3  # further than the log
    last = start(env, folder, started, "--epochs", str(epochs), *arguments)
    last.wait_for(f"after {epochs} epochs", TIMEOUT_S)
    assert last.wait(TIMEOUT_S) == 0, last.output
    return last.output


def test_three_kills(env: dict[str, str], tmp_path: Path, started: list[Watched]) -> None:
    """After three kills, MLflow and wandb have a single run. Its steps increase strictly, although
    batches were trained again, and every kill is an incident."""
    mlflow = MlflowFile(tmp_path / "mlflow.db")
    for kills in range(KILLS):
        before = marked(tmp_path), max(mlflow.steps("distplug/step"), default=-1)
        killed = start(env, tmp_path, started, "--epochs", "100000")

        def has_logged(kills: int = kills, before: tuple[int, int] = before) -> bool:
            both = marked(tmp_path), max(mlflow.steps("distplug/step"), default=-1)
            if any(now <= then for now, then in zip(both, before, strict=True)):
                return False
            return len(files := wandb_files(tmp_path)) > kills and bool(files[kills].steps)

        killed.await_(has_logged, TIMEOUT_S)
        killed.kill()
    printed = finish(env, tmp_path, started)
    assert "does not receive" not in printed

    [(_, status)] = mlflow.runs()
    assert status == "FINISHED"
    for key in ("distplug/step", "distplug/steps_per_second", "val_loss", "distplug/goodput"):
        assert increases(mlflow.steps(key)), key
    assert len(mlflow.steps("distplug/checkpoint_age_secs")) > KILLS
    incidents = mlflow.tags()["keras_distplug.incidents"]
    assert len(re.findall(r"resumed: attempt \d ended: no message", incidents)) == KILLS

    files = wandb_files(tmp_path)
    assert len(files) == KILLS + 1
    assert len({each.run_id for each in files}) == 1
    assert all(each.steps for each in files)
    steps = [step for each in files for step in each.steps]
    assert increases(steps)
    assert [each.exit_code for each in files] == [None] * KILLS + [0]
    assert files[-1].alerts[0][0] == "keras_distplug: resumed"
    last = files[-1].rows[-1]  # one row, of the last window and of the epoch
    assert {"loss", "val_accuracy", "distplug/step_ms"} <= last.keys()
    # The last attempt may end before its first window does.
    assert any("distplug/goodput" in row for each in files for row in each.rows)
    assert steps[-1] == mlflow.steps("distplug/step")[-1]


@pytest.mark.nightly
def test_callbacks_of_trackers(env: dict[str, str], tmp_path: Path, started: list[Watched]) -> None:
    """Their own Keras callbacks, in runs that the script opens and RunLog shares, resume the same
    run after a kill; RunLog logs no step twice there, either."""
    mlflow = MlflowFile(tmp_path / "mlflow.db")
    killed = start(env, tmp_path, started, "--epochs", "100000", "--callbacks")

    def has_logged() -> bool:  # wandb writes its file in blocks
        in_wandb = any(each.steps for each in wandb_files(tmp_path))
        return in_wandb and len(mlflow.steps("distplug/step")) > 2

    killed.await_(has_logged, TIMEOUT_S)
    killed.kill()
    before = len(mlflow.steps("val_loss"))
    printed = finish(env, tmp_path, started, "--callbacks")
    assert "does not receive" not in printed

    assert len(mlflow.runs()) == 1
    epochs = mlflow.steps("val_loss")[before:]  # of MlflowCallback; a kill costs those it queued
    assert epochs == list(range(epochs[0], epochs[-1] + 1))
    assert epochs[0] > 0
    assert increases(mlflow.steps("distplug/step"))
    assert increases(mlflow.steps("distplug/val_loss"))

    files = wandb_files(tmp_path)
    assert len(files) == 2
    assert len({each.run_id for each in files}) == 1
    rows = [row for each in files for row in each.rows]
    windows = [row["distplug/step"] for row in rows if "distplug/steps_per_second" in row]
    assert increases(windows)
    theirs = [row["epoch/epoch"] for row in files[1].rows if "epoch/epoch" in row]
    assert theirs == epochs
