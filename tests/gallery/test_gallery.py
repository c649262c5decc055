"""Scripts as users write them, one for each kind of input: our one line changes nothing, and a
killed run that is started again ends as if it had not been killed."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.processes import Process
from table import GALLERY, PAGE, Script, page

TIMEOUT_S = 120
RUN = Path(__file__).with_name("run.py")


def run(script: Script, folder: Path, how: str, replicas: int = 1) -> dict[str, Any]:
    """What the script has trained; nothing of a run that was killed."""
    folder.mkdir(exist_ok=True)
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONHASHSEED": "0"}
    command = [str(RUN), str(script.path), str(folder), how, str(replicas)]
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
@pytest.mark.parametrize("script", GALLERY, ids=lambda script: script.path.stem)
def test_script(script: Script, tmp_path: Path) -> None:
    """In plain Keras, with our line, and killed and started again: the same bits."""
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
@pytest.mark.parametrize("script", GALLERY, ids=lambda script: script.path.stem)
def test_on_two_replicas(script: Script, tmp_path: Path) -> None:
    """Killed and restarted under MirroredStrategy: the bits of a run that was not."""
    require(script)
    ours = run(script, tmp_path / "ours", "ours", replicas=2)
    run(script, tmp_path / "killed", "killed", replicas=2)
    resumed = run(script, tmp_path / "killed", "ours", replicas=2)
    ours.pop("warnings"), resumed.pop("warnings")
    assert resumed == ours


def test_scripts_are_listed() -> None:
    """Every script of the folder is in the table, and the page holds the table."""
    assert {script.path for script in GALLERY} == set(RUN.parent.glob("scripts/*.py"))
    assert PAGE.read_text() == page(), "run `python tests/gallery/table.py`"
