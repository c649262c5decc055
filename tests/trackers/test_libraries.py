"""Trackers whose library is missing, or whose arguments are invalid, raise an error with a
remedy."""

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
    """Makes the libraries count as installed, whether they are or not."""
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=name)
    )


@pytest.mark.parametrize(("tracker", "module", "package"), PACKAGES)
def test_missing(
    tracker: Any, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the package for pip, even next to a folder of the same name, such as the one
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
def test_reserved_arguments_of_wandb(name: str) -> None:
    """Arguments that make all attempts share a run are set by the tracker itself."""
    with pytest.raises(ConfigurationError, match=f"sets itself .*Received: {name}\\."):
        WandbTracker("mnist", **{name: "x"})


@pytest.mark.usefixtures("installed")
def test_own_run_with_arguments_of_a_new_one() -> None:
    """The script's own run cannot be combined with arguments for a new one."""
    with pytest.raises(ConfigurationError, match="either `run` or"):
        WandbTracker("mnist", run=object())
    with pytest.raises(ConfigurationError, match="either the `run_id` of an existing run, or"):
        MlflowTracker("mnist", run_id="a")


@pytest.mark.usefixtures("installed")
def test_repr() -> None:
    """A tracker's repr shows neither addresses nor settings, which may contain secrets."""
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
