from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_lowest_versions() -> None:
    """The versions that CI installs as the lowest are the lower ends of the declared ranges."""
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *extras["tensorflow-cpu"], *extras["examples"]]
    lowest = {re.sub(r">=([\d.]+).*", r"==\1", requirement) for requirement in declared}
    lines = (ROOT / ".ci" / "lowest.txt").read_text().splitlines()
    assert {line for line in lines if not line.startswith("#")} == lowest


def test_every_dependency_has_an_upper_bound() -> None:
    """A release that does not exist yet was not tested."""
    required = [*PROJECT["dependencies"]]
    for extra in ("tensorflow", "tensorflow-cpu"):
        required += PROJECT["optional-dependencies"][extra]
    assert all(re.fullmatch(r"[a-z0-9-]+>=[\d.]+,<[\d.]+", requirement) for requirement in required)


def test_version() -> None:
    """The version stands in two places that say the same."""
    import keras_distplug

    assert keras_distplug.__version__ == PROJECT["version"]
