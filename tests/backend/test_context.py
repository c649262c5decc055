"""The key-value store, with a fake context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster import run_workers

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

import tensorflow as tf  # noqa: E402

from keras_distplug.backend.tensorflow.runtime import context  # noqa: E402


class Pretended:
    """A context whose service has no values, and answers unless it is frozen or lost."""

    coordination_service = SimpleNamespace(
        coordinated_job_list=[SimpleNamespace(name="worker", num_tasks=2)],
        heartbeat_timeout_in_ms=0,
    )

    def __init__(self) -> None:
        self.states: list[str | None] = [None, None]
        self.asked = 0
        self.thaws: threading.Event | None = None
        self.is_gone = False

    def get_config_key_value(self, key: str, timeout_ms: int) -> str:
        raise tf.errors.DeadlineExceededError(None, None, f"{timeout_ms} ms")

    def set_config_key_value(self, key: str, value: str) -> None:
        self.asked += 1
        if self.thaws is not None:
            self.thaws.wait()
        if self.is_gone:
            raise tf.errors.UnavailableError(None, None, "refused")
        raise tf.errors.AlreadyExistsError(None, None, key)

    def get_task_states(self, jobs: list[tuple[str, int]]) -> list[str | None]:
        assert self.thaws is None, "this would keep all threads from running"
        assert jobs == [("worker", 2)]
        return self.states


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    own = Pretended()
    monkeypatch.setattr(context.context, "context", lambda: own)
    for name in ("_LOOK_S", "_ANSWER_S"):
        monkeypatch.setattr(context, name, 0.05)
    yield own
    if own.thaws is not None:
        own.thaws.set()


def get(timeout_s: float = 0.3) -> Any:
    return context.ServiceKeyValues().get("a word", timeout_s)


def test_wait_ends_if_a_worker_is_lost(pretended: Pretended) -> None:
    """A wait for a value ends with an error if a worker is lost."""
    pretended.states[1] = "heartbeat timeout"
    with pytest.raises(ConnectionError, match="a word: heartbeat timeout"):
        get(timeout_s=50)


def test_wait_times_out(pretended: Pretended) -> None:
    """If all workers are healthy, the wait lasts until the timeout."""
    with pytest.raises(TimeoutError, match="a word"):
        get()
    assert pretended.asked > 1


def test_check_interval_grows_with_workers(pretended: Pretended) -> None:
    """The interval between checks grows with the number of workers, so that the total rate does
    not."""
    jobs = [SimpleNamespace(name="worker", num_tasks=64 * 100)]
    pretended.coordination_service = SimpleNamespace(coordinated_job_list=jobs)
    with pytest.raises(TimeoutError, match="a word"):
        get(1.0)  # enough for 20 checks of a few workers
    assert pretended.asked == 0


def test_frozen_service(pretended: Pretended) -> None:
    """A frozen service is waited for, too; it gets one request, and never one for states."""
    pretended.thaws = threading.Event()
    with pytest.raises(TimeoutError, match="a word"):
        get()
    assert pretended.asked == 1
    for ask in (context.ServiceKeyValues().task_errors, lambda: report("lost")):
        with pytest.raises(TimeoutError, match="does not answer"):
            ask()


def test_lost_service(pretended: Pretended) -> None:
    """A lost service is reported as lost."""
    pretended.is_gone = True
    with pytest.raises(ConnectionError, match="refused"):
        get()
    with pytest.raises(ConnectionError, match="refused"):
        context.ServiceKeyValues().task_errors()


def report(message: str) -> None:
    context.ServiceKeyValues().report(message)


def test_default_heartbeat_timeout(pretended: Pretended) -> None:
    """If no timeout was set, TensorFlow's default is returned."""
    assert context.ServiceKeyValues().heartbeat_timeout_s == 10.0


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_delete_is_recursive() -> None:
    """The service deletes all keys below a deleted key, so that one message deletes the values of
    all workers."""
    script = Path(__file__).parents[1] / "workers" / "upstream.py"
    ended = run_workers(
        [str(script), "lost_message"], 2, env={"KERAS_DISTPLUG_AUTO_INIT": "0"}, timeout_s=240
    )
    assert 'FOUND {"deletes what is below": true}' in ended[0].output
