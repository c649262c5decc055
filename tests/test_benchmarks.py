"""Benchmarks report their results in the same way, and have a row in benchmarks/README.md."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SHARED = "measured"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != SHARED)

pytestmark = pytest.mark.skipif(not NAMES, reason="the sdist has no benchmarks")


@pytest.mark.parametrize("name", NAMES)
def test_reports(name: str) -> None:
    """Every benchmark has `--json`, shows a table, and describes the machine, by shared functions.

    No benchmark is started, because most load TensorFlow, which takes seconds.
    """
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imported = {
        each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == SHARED
        for each in node.names
    }
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert {"parser", "show", "report"} <= imported & called


@pytest.mark.parametrize("name", NAMES)
def test_is_in_the_overview(name: str) -> None:
    """The first table of the README has a row with the command."""
    _, _, below = (FOLDER / "README.md").read_text().partition("## All benchmarks\n")
    overview, _, _ = below.partition("\n## ")
    assert f"\n| `{name}` |" in overview
    assert f"`python benchmarks/{name}.py" in overview


@pytest.fixture(name="measured", scope="module")
def _measured() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SHARED, FOLDER / f"{SHARED}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_spread(measured: ModuleType) -> None:
    """A median is shown with the minimum and maximum, or with the quartiles; a single value
    alone."""
    found = measured.spread([0.001, 0.005, 0.002, 0.004, 0.003])
    assert measured.format_spread(found, ".1f", 1000, " ms") == "3.0 ms (1.0 to 5.0)"
    assert (
        measured.format_spread(found, ".1f", 1000, " ms", quartiles=True) == "3.0 ms (2.0 to 4.0)"
    )
    assert measured.format_spread(measured.spread([2.0])) == "2.00"


def test_report(measured: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine is described in the output and in the JSON file, which contains no secrets."""
    file = tmp_path / "found.json"
    arguments = measured.parser("About.").parse_args(["--json", str(file)])
    settings = {"rounds": 3, "storage_options": {"secret": "of the store"}}
    measured.report(argparse.Namespace(**vars(arguments), **settings), {"a": 1}, "A note.")
    whole = json.loads(file.read_text())
    assert whole["found"] == {"a": 1}
    assert whole["settings"] == {"rounds": 3}
    printed = capsys.readouterr().out
    assert printed.startswith("A note.\nMachine: ")
    for name in ("cores", "processor", "system", "python", "tensorflow", "keras"):
        assert str(whole["machine"][name]) in printed
