from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
from collections.abc import Generator, Iterator
from functools import cache
from importlib import metadata
from typing import Any

import hypothesis
import pytest
from support.stages import ALL_STAGES, STAGES, stage_of

# TensorFlow's default depends on the processor. Most users have it enabled, and it needs the most
# workarounds.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# The slowest tests start first if several processes run the tests, so that none is idle at the end.
LONGEST_FIRST = (
    "tests/contracts/test_matrix.py",
    "tests/stores",
    "tests/scenarios/test_fault_matrix.py",
    "tests/scenarios/test_killed_at_random.py",
    "tests/scenarios/test_killed_workers.py",
    "tests/scenarios/test_changed_workers.py",
    "tests/scenarios/test_preempted_workers.py",
    "tests/scenarios/test_ray.py",
    "tests/scenarios/test_parameter_server.py",
    "tests/scenarios/test_log_of_workers.py",
    "tests/docs/test_docs.py",
    "tests/docs/test_tutorial.py",
    "tests/examples/test_examples.py",
    "tests/examples/test_examples_of_one_process.py",
    "tests/scenarios/test_schedulers.py",
    "tests/checkpoint/test_exact_resume.py",
    "tests/backend/test_scheduled.py",
    "tests/nonfinite/test_step_guard.py",
    "tests/storage/test_kills.py",
    "tests/data/test_sources.py",
    "tests/nonfinite/test_nan_watchdog.py",
    "tests/checkpoint/test_two_tiers.py",
    "tests/checkpoint/test_resume.py",
    "tests/checkpoint/test_saves_of_fit.py",
    "tests/backend/test_upstream.py",
)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which is optional
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`, tests that share fixtures run in one process. (`--dist loadgroup` of
    pytest-xdist 3.8 has no effect under pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

        def remove_node(self, node: Any) -> str | None:
            """Reschedules only unfinished tests of a process that died, without the one that killed
            it. Upstream also reschedules finished groups, and then waits for them forever."""
            units = self.assigned_work.pop(node)
            left = [(name, test) for name, unit in units.items() for test in unit if not unit[test]]
            if not left:
                return None
            units[left[0][0]][left[0][1]] = True
            again = {name: unit for name, unit in units.items() if not all(unit.values())}
            self.workqueue.update(again)
            for other in self.assigned_work:
                if other in self.registered_collections:  # others follow after collection
                    self._reschedule(other)
            return left[0][1]

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stage",
        default="default",
        metavar="STAGES",
        help=f"which tests to run: {', '.join(STAGES)} or all, several separated by commas "
        "(default: %(default)s); a test that is named (file.py::test) always runs",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes Hypothesis draw the same examples in every run, except with `--stage all`, so that a
    test fails only if something has changed."""
    hypothesis.settings.register_profile("same examples", derandomize=True)
    if config.getoption("--stage") != "all":
        hypothesis.settings.load_profile("same examples")
    # A script that runs the tests in the background makes them, and the processes that they start,
    # ignore SIGINT.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _deselect_other_stages(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--stage").split(",")
    if unknown := set(wanted) - {*STAGES, "all"}:
        raise pytest.UsageError(f"--stage: expected some of {STAGES} or all, received {unknown}")
    stages = config.stash[ALL_STAGES] = {item.nodeid: stage_of(item) for item in items}
    if "all" in wanted or any("::" in argument for argument in config.args):
        return
    others = [item for item in items if stages[item.nodeid] not in wanted]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if stages[item.nodeid] in wanted]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _deselect_other_stages(config, items)
    if hasattr(config, "workerinput"):  # one of several processes
        ranks = {group: rank for rank, group in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: ranks.get(_group(item.nodeid), len(ranks)))


def _group(nodeid: str) -> str:
    """Returns the test's file, or the folder whose tests share servers."""
    file = nodeid.partition("::")[0]
    return "tests/stores" if file.startswith("tests/stores/") else file


def pytest_collection_finish() -> None:
    gc.freeze()  # the imported objects, so that the collections below take no time


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("tf"):
        _split_cpu()
        _forget_seed()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Collects and freezes garbage, so that no dataset iterator becomes old garbage. An iterator's
    autotune thread may miss the signal to end, and then only wakes up after as long as the iterator
    has lived, up to a minute: collecting it in a later test exceeded that test's timeout.
    TensorFlow keeps the remaining objects forever; frozen, they cost later collections nothing."""
    if item.get_closest_marker("tf"):
        gc.collect()
        gc.freeze()


UPSTREAM = "tests/backend/test_upstream.py"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records the finding of a test of an upstream bug, for `pytest_terminal_summary`."""
    report = yield
    if item.nodeid.startswith(UPSTREAM) and (call.when == "call" or not report.passed):
        finding = "not known"  # the search for the bug failed
        if report.passed:
            finding = "needed"
        elif report.skipped or (call.excinfo and call.excinfo.errisinstance(AssertionError)):
            finding = "unnecessary"
        fault = inspect.getdoc(getattr(item, "obj", None)) or ""
        report.user_properties.append(("upstream", [finding, " ".join(fault.split())]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints which upstream bugs still exist, as found by the tests in this run."""
    found: dict[str, list[str]] = {"needed": [], "unnecessary": [], "not known": []}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "upstream":
                    finding, fault = value
                    found[finding].append(f"{report.nodeid.partition('::')[2]}: {fault}")
    if not any(found.values()):
        return
    names = ("tensorflow", "tensorflow-cpu", "tf-nightly-cpu", "keras", "keras-nightly")
    versions = [f"{name} {_version(name)}" for name in names]
    there = ", ".join(each for each in versions if not each.endswith(" "))
    terminalreporter.section(f"workarounds of upstream's faults, with {there}")
    for finding, faults in found.items():
        terminalreporter.write_line(f"{len(faults)} {finding}{':' if faults else ''}")
        for fault in sorted(faults):
            terminalreporter.write_line(f"  {fault}")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Pytest's own fixture, which captures the package's messages whatever earlier tests have
    configured."""
    logger = logging.getLogger("keras_distplug")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


class _Forgetful(dict[Any, Any]):
    def __setitem__(self, key: object, value: object) -> None:
        return


@pytest.fixture(autouse=True)
def as_other_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats every `fit` of a test as one of another process, unless the test is about several fits
    in one process (`one_process`)."""
    of = request.node.get_closest_marker
    if of("tf") and not of("one_process"):
        from keras_distplug.checkpoint import opening, saves

        monkeypatch.setattr(opening, "finished_here", _Forgetful())
        monkeypatch.setattr(saves, "_announced_s", {})


def _forget_seed() -> None:
    """Resets the seed that an earlier test has set, from which TensorFlow would derive others."""
    import tensorflow as tf

    tf.random.set_seed(None)


@cache
def _split_cpu() -> None:
    """Creates two logical devices, for tests of several replicas; only possible before the first
    tensor."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
