"""Who a process of a job is. Loads nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def own_name() -> str:
    """Of this process, as the supervisor has it."""
    task = _tf_config().get("task", {"type": "worker", "index": 0})
    return f"{task['type']}-{task['index']}"


def sign_in(folder: Path) -> None:
    """So that a chief beside parameter servers finds this process."""
    (folder / f"pid-{own_name()}").write_text(str(os.getpid()))


def workers() -> int:
    """How many there are."""
    return len(_tf_config().get("cluster", {}).get("worker", ["alone"]))


def _tf_config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return found
