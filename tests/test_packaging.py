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


WITH_A_WARNING = {"keras", "tensorboard", "tensorflow", "tensorflow-cpu"}


def test_upper_limits() -> None:
    """A newer Keras or TensorFlow installs, and causes a warning; of others, none is untested."""
    required = [*PROJECT["dependencies"]]
    for extra in ("tensorflow", "tensorflow-cpu"):
        required += PROJECT["optional-dependencies"][extra]
    for requirement in required:
        name, _, limits = requirement.partition(">=")
        assert ("<" in limits) == (name not in WITH_A_WARNING), requirement


def test_version() -> None:
    """The version stands in two places that say the same."""
    import keras_distplug

    assert keras_distplug.__version__ == PROJECT["version"]
