"""Scripts as users write them, one for every kind of input and of model: our one line changes
nothing, and a killed and restarted run ends like one that was not killed."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.processes import Process
from table import FOLDER, INPUTS, MODELS, PAGE, Script, page

TIMEOUT_S = 120
RUN = FOLDER / "run.py"


def run(script: Script, folder: Path, how: str, replicas: int = 1) -> dict[str, Any]:
    """Returns the result of the script; nothing for a run that was killed."""
    folder.mkdir(exist_ok=True)
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONHASHSEED": "0"}
    numbers = [str(replicas), str(script.batches)]
    command = [str(RUN), str(script.path), str(folder), how, *numbers]
    with Process(command, environ) as process:
        code = process.wait(TIMEOUT_S)
        printed = process.output()
    if how == "killed":
        assert (code, (folder / "fired").exists()) == (-9, True), printed
        return {}
    assert code == 0, printed
    found: dict[str, Any] = json.loads((folder / f"{how}.json").read_text())
    return found


def require(script: Script) -> None:
    """Skips the test unless the script's modules are installed."""
    for name in script.needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"pip install '.[test-inputs]' (it needs {name})")


@pytest.mark.tf
@pytest.mark.cluster
@pytest.mark.parametrize("script", [*INPUTS, *MODELS], ids=lambda script: script.path.stem)
def test_script(script: Script, tmp_path: Path) -> None:
    """A script gives the same bits in plain Keras (unless the table says otherwise), with our line,
    and killed and restarted."""
    require(script)
    plain = run(script, tmp_path / "plain", "plain")
    ours = run(script, tmp_path / "ours", "ours")
    run(script, tmp_path / "killed", "killed")
    resumed = run(script, tmp_path / "killed", "ours")
    warned = ours.pop("warnings")
    plain.pop("warnings"), resumed.pop("warnings")
    assert (ours == plain) == script.is_plain
    assert resumed == ours
    assert bool(warned) == (script.warning is not None), warned
    if script.warning is not None:
        assert script.warning in "\n".join(warned)


@pytest.mark.tf
@pytest.mark.cluster
@pytest.mark.parametrize("script", INPUTS, ids=lambda script: script.path.stem)
def test_on_two_replicas(script: Script, tmp_path: Path) -> None:
    """Under MirroredStrategy, a killed and restarted run gives the bits of one that was not
    killed."""
    require(script)
    ours = run(script, tmp_path / "ours", "ours", replicas=2)
    run(script, tmp_path / "killed", "killed", replicas=2)
    resumed = run(script, tmp_path / "killed", "ours", replicas=2)
    ours.pop("warnings"), resumed.pop("warnings")
    assert resumed == ours


def test_scripts_are_listed() -> None:
    """Every script of the folders is in a table, and the page contains the tables."""
    for folder, scripts in (("inputs", INPUTS), ("models", MODELS)):
        assert {script.path for script in scripts} == set((FOLDER / folder).glob("*.py"))
    assert PAGE.read_text() == page(), "run `python tests/gallery/table.py`"
