"""Trackers whose library is missing, or that are given what they cannot use, say what to do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from support.cluster import environment

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.trackers.mlflow_tracker import MlflowTracker
from keras_distplug.trackers.wandb_tracker import WandbTracker

PACKAGES = [(WandbTracker, "wandb", "wandb"), (MlflowTracker, "mlflow", "mlflow-skinny")]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as installed, whether or not they are."""
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=name)
    )


@pytest.mark.parametrize(("tracker", "module", "package"), PACKAGES)
def test_missing(
    tracker: Any, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the package for pip, also next to a folder of the same name, such as the one
    in which wandb keeps its files."""
    (tmp_path / module).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(Path(sys.prefix) / "nothing")])
    for name in list(sys.modules):
        if name.partition(".")[0] == module:
            monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    with pytest.raises(ConfigurationError, match=rf"Run pip install {package}\.$"):
        tracker()


@pytest.mark.parametrize("name", ["id", "resume", "reinit"])
@pytest.mark.usefixtures("installed")
def test_what_wandb_is_not_given(name: str) -> None:
    """What makes all attempts share a run is ours."""
    with pytest.raises(ConfigurationError, match=f"sets itself .*Received: {name}\\."):
        WandbTracker("mnist", **{name: "x"})


@pytest.mark.usefixtures("installed")
def test_own_run_and_a_new_one() -> None:
    """A run of the script is not combined with arguments for a new one."""
    with pytest.raises(ConfigurationError, match="either `run` or"):
        WandbTracker("mnist", run=object())
    with pytest.raises(ConfigurationError, match="either the `run_id` of an existing run, or"):
        MlflowTracker("mnist", run_id="a")


@pytest.mark.usefixtures("installed")
def test_repr() -> None:
    """Neither addresses nor settings, which may hold secrets, are shown."""
    assert repr(WandbTracker("mnist", settings={"api_key": "secret"})) == "WandbTracker('mnist')"
    assert repr(MlflowTracker(tracking_uri="http://user:secret@host")) == "MlflowTracker()"


def test_nothing_is_loaded() -> None:
    """Neither the package nor its trackers load a tracker's library."""
    code = (
        "import sys, keras_distplug as kd; kd.WandbTracker, kd.MlflowTracker; "
        "print(sorted({'wandb', 'mlflow', 'tensorflow', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr
