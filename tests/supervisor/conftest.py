from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervision import PRELUDE, Supervision, environment


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Supervision]]:
    """Starts `keras-distplug run` on a script that starts with PRELUDE."""
    started: list[Supervision] = []

    def start(
        body: str,
        *options: str,
        workers: int = 2,
        command: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        **environ: str,
    ) -> Supervision:
        script = tmp_path / "train.py"
        script.write_text(PRELUDE + body)
        run = [*prefix, sys.executable, "-m", "keras_distplug", "run"]
        run += ["--workers", str(workers), *options]
        run.append("--no-fork-server")  # these workers do not import TensorFlow
        process = subprocess.Popen(
            [*run, "--", *(command or (sys.executable, str(script)))],
            env=environment(TMPDIR=str(tmp_path), **environ),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Supervision(tmp_path, process))
        return started[-1]

    yield start
    for supervision in started:
        if supervision.process.poll() is None:
            supervision.process.send_signal(signal.SIGTERM)
            supervision.process.send_signal(signal.SIGTERM)
        supervision.process.communicate(timeout=30)
