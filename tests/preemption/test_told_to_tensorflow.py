"""TensorFlow's notice of preemption, in a store of this process."""

from __future__ import annotations

import queue

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

from cluster.key_values import Memory  # noqa: E402

from keras_distplug.backend.tensorflow.runtime.preemption_notice import NOTICE_KEY, task_name  # noqa: E402
from keras_distplug.preemption.told_to_tensorflow import NoticeToTensorFlow  # noqa: E402


class Service(Memory):
    """Waits without a limit, and counts the questions."""

    asked = 0

    def get(self, key: str, timeout_s: float | None) -> str:
        assert key == NOTICE_KEY
        assert timeout_s is None
        self.asked += 1
        return super().get(key, timeout_s)


def test_heard() -> None:
    """The notice is told once, by the name of the worker, and is not there for the next `fit`."""
    service, heard = Service(), queue.SimpleQueue[str]()
    notice = NoticeToTensorFlow(service, heard.put)
    assert service.put_first(NOTICE_KEY, "/job:worker/replica:0/task:1")
    assert heard.get(timeout=20) == "worker-1"
    notice._thread.join(20)
    notice.close()
    assert (service.asked, service.values, heard.empty()) == (1, {}, True)


def test_closed_again_and_again() -> None:
    """Each `fit` asks once; behind it no thread is left, nor what has ended it."""
    service, heard = Service(), queue.SimpleQueue[str]()
    for number in range(1, 4):
        notice = NoticeToTensorFlow(service, heard.put)
        notice.close()
        notice.close()
        assert not notice._thread.is_alive()
        assert (service.asked, service.values, heard.empty()) == (number, {}, True)


def test_between_two() -> None:
    """What comes when one is closed waits for the next one."""
    service, heard = Service(), queue.SimpleQueue[str]()
    NoticeToTensorFlow(service, heard.put).close()
    assert service.put_first(NOTICE_KEY, "/job:chief/task:0")
    notice = NoticeToTensorFlow(service, heard.put)
    assert heard.get(timeout=20) == "chief-0"
    notice.close()


def test_lost() -> None:
    """Where the service is gone, nothing is told, and closing does not wait."""
    service, heard = Service(), queue.SimpleQueue[str]()
    service.breaks_at = NOTICE_KEY
    notice = NoticeToTensorFlow(service, heard.put)
    notice._thread.join(20)
    notice.close()
    assert heard.empty()


def test_task_name() -> None:
    """What is no name of TensorFlow's stays as it is."""
    assert task_name("maintenance of host 3") == "maintenance of host 3"
