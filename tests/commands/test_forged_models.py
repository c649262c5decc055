"""`export` and `replay` refuse a forged model description before Keras is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.forged_configs import FORGED, FORGED_NAMES, layer, made
from commands import made as runs_made
from commands.test_exporting import Say
from storage.checkpoints import RUN
from support.cluster import environment

from keras_distplug.nonfinite import incident_files
from keras_distplug.nonfinite.incident_files import Incident
from keras_distplug.storage import architecture
from keras_distplug.storage.architecture import Architecture
from keras_distplug.storage.files import open_files
from keras_distplug.storage.sealed import seal, unseal

pytestmark = pytest.mark.timeout(60)

MOST_SECS, MOST_MB = 2.0, 300  # of the processor, so that a busy machine makes no difference
SCRIPT = r"""
import json, re, sys, time
from keras_distplug.cli import main
code = main(sys.argv[1:])
heavy = sorted({"keras", "tensorflow", "tensorboard", "own_code"} & sys.modules.keys())
status = open("/proc/self/status").read()  # `getrusage` counts the parent's memory at the fork
peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024
print(json.dumps([code, heavy, peak, time.process_time()]))
"""


def run_with(directory: Path, entry: Any) -> Path:
    """A run whose model description contains an entry, with an incident."""
    runs_made.run(directory, runs_made.state(4))
    files = open_files(directory)
    model = made("keras", "Sequential", layers=[layer("Dense", units=1), entry])
    architecture.remember(files, RUN, Architecture(model, 0))
    incident = Incident(RUN, 1, 0, 0, "told", "2020-01-01T00:00:00+00:00")
    batch = np.ones((2, 3), np.float32)
    files.create(incident.path, incident_files.encode(incident, (batch, batch)))
    return directory


def refused(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in another process and checks that it imports nothing heavy."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, command)],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    code, heavy, peak, secs = json.loads(done.stdout.splitlines()[-1])
    assert (code, heavy) == (2, []), done.stderr
    assert peak < MOST_MB
    assert secs < MOST_SECS
    assert "Traceback" not in done.stderr
    return done


KINDS = (
    "Lambda",
    "a vocabulary at a URL",
    "many units",
    "an array of long texts",
    "function 'get_file' of 'keras.src.utils.file_utils'",
    "class 'Popen' of 'subprocess'",
    "class 'Own' of 'own'",
)


@pytest.mark.parametrize("kind", KINDS)
def test_refused(kind: str, tmp_path: Path) -> None:
    """A command ends with advice within two seconds and 300 MB, without Keras, TensorFlow or a
    file."""
    directory = run_with(tmp_path / "runs", {**FORGED, **FORGED_NAMES}[kind])
    before = runs_made.contents(tmp_path)
    for command in (("export", directory, tmp_path / "out.keras"), ("replay", directory)):
        done = refused(*command, folder=tmp_path)
        assert "Entry model/config/layers/1" in done.stderr
        assert " of the model description is not allowed: " in done.stderr
        assert "for a command: with --import MODULE" in done.stderr
        assert "call `export(path)` on its BackupAndRestore" in done.stderr
    assert runs_made.contents(tmp_path) == before


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in FORGED])
def test_refused_before_modules_are_imported(kind: str, tmp_path: Path) -> None:
    """Entries that no user module could make valid are refused before modules are imported."""
    directory = run_with(tmp_path / "runs", FORGED[kind])
    (tmp_path / "own_code.py").write_text("open('imported', 'w')")
    command = ("export", directory, tmp_path / "out.keras", "--import", "own_code")
    refused(*command, folder=tmp_path)
    assert not (tmp_path / "imported").exists()


def test_manifest_of_larger_arrays(tmp_path: Path, say: Say) -> None:
    """A manifest that gives its variables larger shapes than its files have room for is refused,
    and so does not vouch for a large model."""
    directory = run_with(tmp_path / "runs", FORGED["many units"])
    path = directory / RUN / "step-00000004" / "MANIFEST.json"
    body = unseal(path.read_text())
    body["variables"][0]["shape"] = [10**9]
    path.write_text(seal(body))
    code, printed = say("export", directory, tmp_path / "out.keras")
    assert code == 1
    assert "declares 4000000024 bytes of variables" in printed


def test_no_mark_of_a_safe_file(tmp_path: Path, say: Say) -> None:
    """An export to safetensors builds no model, so it ignores the description."""
    directory = run_with(tmp_path / "runs", FORGED["Lambda"])
    assert say("export", directory, tmp_path / "out.safetensors")[0] == 0
