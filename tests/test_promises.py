"""`promises.toml` names existing tests, in the stages in which they run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from support.stages import ALL_STAGES, NIGHTLY, PROMISES, QUICK, STAGES

TESTS = Path(__file__).parent


@pytest.fixture
def stages(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """Returns the stage of every collected test."""
    return request.config.stash[ALL_STAGES]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise["says"][:60])
def test_tests_of_a_promise(promise: Mapping[str, object], stages: Mapping[str, str]) -> None:
    """Every promise is proven by existing tests, at least one of them in the default stage."""
    assert promise.keys() <= {"says", *STAGES}
    assert promise["default"], "nothing proves this with every `pytest`"
    names = [(stage, name) for stage in STAGES for name in promise.get(stage, ())]  # type: ignore[attr-defined]
    missing = _not_collected((name for _, name in names), stages)
    for stage, name in names:
        if name not in missing:
            found = {of for nodeid, of in stages.items() if _is_of(nodeid, name)}
            assert stage in found, f"{name} does not run in stage {stage}, but in {found}"
    _skip_if(missing)


@pytest.mark.parametrize(
    ("names", "allowed"),
    [(QUICK, {"default"}), (NIGHTLY, {"nightly", "soak"})],
    ids=["quick", "nightly"],
)
def test_listed_tests(
    names: Collection[str], allowed: Collection[str], stages: Mapping[str, str]
) -> None:
    """Tests listed as quick or nightly exist, and run in these stages only."""
    missing = _not_collected(names, stages)
    for name in names:
        if name not in missing:
            found = {of for nodeid, of in stages.items() if _is_of(nodeid, name)}
            assert found, f"{name} does not exist"
            assert found <= allowed, f"{name} runs in {found}"
    _skip_if(missing)


def _not_collected(names: Iterable[str], stages: Mapping[str, str]) -> list[str]:
    """Returns the tests in existing files of which nothing was collected: pytest was given others,
    or the whole file needs a package that is not installed."""
    collected = {nodeid.partition("::")[0] for nodeid in stages}
    files = {name: name.partition("::")[0] for name in names}
    return [
        name
        for name, file in files.items()
        if file not in collected and (TESTS.parent / file).exists()
    ]


def _skip_if(missing: Sequence[str]) -> None:
    if missing:
        pytest.skip(f"not collected, so not checked: {', '.join(missing)}")


def _is_of(nodeid: str, name: str) -> bool:
    return nodeid == name or nodeid.startswith((f"{name}[", f"{name}::"))
