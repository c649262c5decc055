"""Every example is run by a test and named in the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from support.cluster import ROOT

EXAMPLES = ROOT / "examples"
FILES = sorted(
    path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts
)
NAMES = [str(path.relative_to(EXAMPLES)) for path in FILES]


def texts_in(source: str) -> set[str]:
    """Returns the string literals of Python code as a whole, without comments and docstrings."""
    nodes = ast.walk(ast.parse(source))
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def run_by_readme() -> Iterator[str]:
    """`.ci/run` runs the README's commands."""
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    for command in commands:
        yield from re.findall(r"python examples/(\S+)", command)


@cache
def named_by_tests() -> frozenset[str]:
    """Returns all strings in tests, including the names of the examples that they run."""
    files = set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}
    return frozenset(run_by_readme()).union(*(texts_in(path.read_text()) for path in files))


def forgotten(names: Iterable[str], known: frozenset[str]) -> list[str]:
    return [name for name in names if Path(name).name not in known]


def test_every_example_is_run() -> None:
    """A test, or CI itself, runs every file of examples/."""
    assert len(NAMES) >= 10
    assert forgotten(NAMES, named_by_tests()) == [], "no test names them: see tests/examples"


def test_control() -> None:
    """An example that is never run is detected, even if a comment or a docstring names it."""
    known = frozenset(texts_in('"""Of new.py."""\n# new.py\nrun("old.py", "new.py.txt")'))
    assert forgotten(["slurm/old.py", "new.py"], known) == ["new.py"]


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_documented(name: str) -> None:
    """The page of examples names it, with its command."""
    page = (ROOT / "docs" / "examples.md").read_text()
    assert f"`examples/{name}`" in page
