"""`promises.toml` names existing tests, in the stages in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.stages import ALL_STAGES, NIGHTLY, PROMISES, STAGES

TESTS = Path(__file__).parent


@pytest.fixture
def stages(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """Returns the stage of every test."""
    found = request.config.stash[ALL_STAGES]
    files = {f"tests/{file.relative_to(TESTS)}" for file in TESTS.rglob("test_*.py")}
    if missing := files - {nodeid.partition("::")[0] for nodeid in found}:
        pytest.skip(f"{len(missing)} files of tests are not collected")
    return found


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise["says"][:60])
def test_tests_of_a_promise(promise: Mapping[str, object], stages: Mapping[str, str]) -> None:
    """Every promise is proven by existing tests, at least one of them in the default stage."""
    assert promise.keys() <= {"says", *STAGES}
    assert promise["default"], "nothing proves this with every `pytest`"
    for stage in STAGES:
        for name in promise.get(stage, ()):  # type: ignore[attr-defined]
            found = {of for nodeid, of in stages.items() if _is_of(nodeid, name)}
            assert stage in found, f"{name} does not run in stage {stage}, but in {found}"


def test_nightly_tests_exist(stages: Mapping[str, str]) -> None:
    """Tests listed as nightly exist, and do not run by default."""
    for name in NIGHTLY:
        found = {of for nodeid, of in stages.items() if _is_of(nodeid, name)}
        assert found, f"{name} does not exist"
        assert found <= {"nightly", "soak"}, f"{name} runs in {found}"


def _is_of(nodeid: str, name: str) -> bool:
    return nodeid == name or nodeid.startswith((f"{name}[", f"{name}::"))
