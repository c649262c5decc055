"""TensorFlow's preemption notice, with an in-memory store."""

from __future__ import annotations

import queue

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

from cluster.key_values import Memory  # noqa: E402

from keras_distplug.backend.tensorflow.runtime.preemption_notice import NOTICE_KEY, task_name  # noqa: E402
from keras_distplug.preemption.tf_preemption import TfPreemptionNotice  # noqa: E402


class Service(Memory):
    """Waits without a limit, and counts the requests."""

    asked = 0

    def get(self, key: str, timeout_s: float | None) -> str:
        assert key == NOTICE_KEY
        assert timeout_s is None
        self.asked += 1
        return super().get(key, timeout_s)


def test_notice() -> None:
    """A notice is reported once, with the worker's name, and is removed before the next `fit`."""
    service, received = Service(), queue.SimpleQueue[str]()
    notice = TfPreemptionNotice(service, received.put)
    assert service.put_first(NOTICE_KEY, "/job:worker/replica:0/task:1")
    assert received.get(timeout=20) == "worker-1"
    notice._thread.join(20)
    notice.close()
    assert (service.asked, service.values, received.empty()) == (1, {}, True)


def test_repeated_fits() -> None:
    """Every `fit` sends one request, and leaves no thread and no stored value."""
    service, received = Service(), queue.SimpleQueue[str]()
    for number in range(1, 4):
        notice = TfPreemptionNotice(service, received.put)
        notice.close()
        notice.close()
        assert not notice._thread.is_alive()
        assert (service.asked, service.values, received.empty()) == (number, {}, True)


def test_notice_between_fits() -> None:
    """A notice that arrives after one instance is closed goes to the next one."""
    service, received = Service(), queue.SimpleQueue[str]()
    TfPreemptionNotice(service, received.put).close()
    assert service.put_first(NOTICE_KEY, "/job:chief/task:0")
    notice = TfPreemptionNotice(service, received.put)
    assert received.get(timeout=20) == "chief-0"
    notice.close()


def test_lost() -> None:
    """If the service is gone, nothing is reported, and closing does not wait."""
    service, received = Service(), queue.SimpleQueue[str]()
    service.breaks_at = NOTICE_KEY
    notice = TfPreemptionNotice(service, received.put)
    notice._thread.join(20)
    notice.close()
    assert received.empty()


def test_task_name() -> None:
    """Text that is not a task name of TensorFlow remains unchanged."""
    assert task_name("maintenance of host 3") == "maintenance of host 3"
