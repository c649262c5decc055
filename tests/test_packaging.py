from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_lowest_versions() -> None:
    """The lowest versions that CI installs are the lower bounds of the declared ranges."""
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *extras["tensorflow-cpu"], *extras["examples"]]
    lowest = {re.sub(r">=([\d.]+).*", r"==\1", requirement) for requirement in declared}
    lines = (ROOT / ".ci" / "lowest.txt").read_text().splitlines()
    assert {line for line in lines if not line.startswith("#")} == lowest


KNOWN_BREAKS: dict[str, str] = {}  # the reason for every limited requirement


def test_upper_limits() -> None:
    """Requirements have no upper limits, except for known incompatibilities."""
    required = list(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        required += extra
    limited = {each for each in required if re.search("<|==|~=", each) and "mkdocs" not in each}
    assert limited == set(KNOWN_BREAKS)


def test_runtime_dependencies_are_imported() -> None:
    """The package imports all of its runtime dependencies."""
    text = "\n".join(path.read_text() for path in (ROOT / "keras_distplug").rglob("*.py"))
    names = {re.split("[>=<]", each)[0].replace("-", "_") for each in PROJECT["dependencies"]}
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert names - imported == set()


def test_version() -> None:
    """Both places that state the version agree."""
    import keras_distplug

    assert keras_distplug.__version__ == PROJECT["version"]
