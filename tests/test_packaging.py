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


KNOWN_BREAKS: dict[str, str] = {}  # of requirements, the reason


def test_upper_limits() -> None:
    """A user with newer packages is not locked out, unless a break is known."""
    required = list(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        required += extra
    limited = {each for each in required if re.search("<|==|~=", each) and "mkdocs" not in each}
    assert limited == set(KNOWN_BREAKS)


def test_runtime_dependencies_are_imported() -> None:
    """What is installed with the package is what the package imports."""
    text = "\n".join(path.read_text() for path in (ROOT / "keras_distplug").rglob("*.py"))
    names = {re.split("[>=<]", each)[0].replace("-", "_") for each in PROJECT["dependencies"]}
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert names - imported == set()


def test_version() -> None:
    """The version stands in two places that say the same."""
    import keras_distplug

    assert keras_distplug.__version__ == PROJECT["version"]
