"""With TensorFlow: restarted workers are forked, with results identical to an uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.cluster import run_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "workers" / "forked.py"


@pytest.mark.parametrize("workers", [1, 2])
def test_forked_after_a_kill(tmp_path: Path, workers: int) -> None:
    """SIGKILL once the fork server is ready: all workers are then forked.

    The script sets an environment variable before it imports TensorFlow. The result is the same as
    without a kill.
    """
    found = {}
    for fault in ("none", "kill"):
        folder = tmp_path / fault
        folder.mkdir()
        log = folder / "log"
        command = [str(SCRIPT), str(folder), fault]
        # With a fault, the script is started as by a user; the fork server comes later.
        is_forked = fault == "none"
        ended = run_job(command, workers, f"--log={log}", is_forked=is_forked, timeout_s=200)
        assert ended.returncode == 0, ended.output
        events = [json.loads(line) for line in log.read_text().splitlines()]
        started = [each["forked"] for each in events if each["event"] == "started"]
        names = [f"worker-{index}" for index in range(workers)]
        assert is_forked or "without the fork server" not in ended.output
        assert started == ([names] if fault == "none" else [[], names]), ended.output
        found[fault] = [np.load(folder / f"{index}.npz") for index in range(workers)]
    for killed, uninterrupted in zip(found["kill"], found["none"], strict=True):
        assert killed.files == uninterrupted.files
        assert "weight_0" in killed.files
        for name in killed.files:
            assert killed[name].tobytes() == uninterrupted[name].tobytes(), name
