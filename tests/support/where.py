"""The identity of a process in its job. Loads nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def own_name() -> str:
    """Returns this process's name, as the supervisor knows it."""
    task = _tf_config().get("task", {"type": "worker", "index": 0})
    return f"{task['type']}-{task['index']}"


def sign_in(folder: Path) -> None:
    """Registers this process, so that the chief of a job with parameter servers can find it."""
    (folder / f"pid-{own_name()}").write_text(str(os.getpid()))


def workers() -> int:
    """Returns the number of workers."""
    return len(_tf_config().get("cluster", {}).get("worker", ["alone"]))


def _tf_config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return found
