from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stamina

from keras_distplug.cli import main

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture(autouse=True)
def tried_once() -> Iterator[None]:
    stamina.set_testing(True, attempts=1)
    yield
    stamina.set_testing(False)


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty directory, on the disk and in a store."""
    return str(tmp_path / "runs") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command with --json; gives its exit code, and the document or what went to stderr."""

    def ask(*arguments: object) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([*map(str, arguments), "--json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else printed.err

    return ask


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command; gives its exit code and all it prints."""

    def say(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([*map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return say
