"""TensorFlow's eager context: its state, its reset, and the coordination service's key-value store.

TensorFlow 2.18 to 2.21. "Collective ops must be configured at program startup"
(tensorflow/tensorflow#35297): MultiWorkerMirroredStrategy cannot be created once any tensor exists.
`_reset_context` drops the context to make this possible; objects of the old context are destroyed.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.eager import context

from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(tensorflow="2.18 to 2.21", issue="tensorflow/tensorflow#35297")

_HEARTBEAT_S = 10.0  # TensorFlow's default timeout
_ANSWER_S = 1.0  # for an answer of the service, which may be frozen
# A worker that waits for a value checks the others at this interval. With more than
# _LOOKS_WORKERS workers the interval grows, so that the total rate stays the same.
_LOOK_S = 1.0
_LOOKS_WORKERS = 64


def is_initialized() -> bool:
    """True once a tensor, variable or dataset exists: then it is too late to form a cluster."""
    return context.context()._context_handle is not None


def in_cluster() -> bool:
    """True once this process has formed a cluster with others."""
    service = context.context().coordination_service
    return is_initialized() and service is not None and bool(service.coordinated_job_list)


def global_seed() -> int | None:
    """Returns the seed passed to `tf.random.set_seed`; None if it was not called."""
    seed: int | None = context.global_seed()
    return seed


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Creates operations as if `tf.random.set_seed(seed)` had been called."""
    there = context.context()
    before = there._seed, there._rng
    there._seed, there._rng = seed, random.Random(seed)
    try:
        yield
    finally:
        there._seed, there._rng = before


def reset() -> None:
    """Restarts TensorFlow with the user's settings. Existing tensors, variables and datasets are
    destroyed: using one of them may crash the process."""
    seed, soft_placement = global_seed(), tf.config.get_soft_device_placement()
    inter_op = tf.config.threading.get_inter_op_parallelism_threads()
    intra_op = tf.config.threading.get_intra_op_parallelism_threads()
    visible = tf.config.get_visible_devices()
    logical = [
        (device, configuration)
        for device in tf.config.list_physical_devices()
        if (configuration := tf.config.get_logical_device_configuration(device))
    ]
    growing = [
        device
        for device in tf.config.list_physical_devices("GPU")
        if tf.config.experimental.get_memory_growth(device)
    ]
    context._reset_context()
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    tf.config.threading.set_intra_op_parallelism_threads(intra_op)
    tf.config.set_soft_device_placement(soft_placement)
    tf.config.set_visible_devices(visible)
    for device, configuration in logical:
        tf.config.set_logical_device_configuration(device, configuration)
    for device in growing:
        tf.config.experimental.set_memory_growth(device, True)
    if seed is not None:
        tf.random.set_seed(seed)


_asking: threading.Thread | None = None
_asking_lock = threading.Lock()


class ServiceKeyValues:
    """The coordination service's key-value store. It uses no collectives, so any thread may call it
    at any time."""

    def put(self, key: str, value: str) -> None:
        with _as_builtin_errors(key):
            context.context().set_config_key_value(key, value)

    def put_first(self, key: str, value: str) -> bool:
        try:
            self.put(key, value)
        except ConnectionError as error:
            if isinstance(error.__cause__, tf.errors.AlreadyExistsError):
                return False
            raise
        return True

    def get(self, key: str, timeout_s: float | None) -> str:
        if timeout_s is None:
            return self._get(key, 0)  # without a limit
        look_s = _look_s()
        if timeout_s < 2 * look_s:
            return self._get(key, max(1, int(timeout_s * 1000)))
        # The service does not interrupt a wait for the value of a lost worker (TensorFlow 2.18 to
        # 2.21).
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            try:
                return self._get(key, max(1, int(min(left_s, look_s) * 1000)))
            except TimeoutError:
                if error := self._first_error():
                    raise ConnectionError(f"{key}: {error}") from None
                if left_s <= look_s:
                    raise

    def _get(self, key: str, timeout_ms: int) -> str:
        with _as_builtin_errors(key):
            return str(context.context().get_config_key_value(key, timeout_ms))

    def delete(self, key: str) -> None:
        """Deletes `key` and all keys below it: `a` and `a/b`."""
        with _as_builtin_errors(key):
            context.context().delete_config_key_value(key)

    def barrier(self, key: str, timeout_s: float) -> None:
        with _as_builtin_errors(key):
            context.context().wait_at_barrier(key, int(timeout_s * 1000))

    def _first_error(self) -> str | None:
        with contextlib.suppress(TimeoutError):  # a frozen service may recover
            return next(filter(None, self.task_errors()), None)
        return None

    def task_errors(self) -> list[str | None]:
        """Returns every worker's error, or None, as known to the service; the chief comes first.

        Raises:
            TimeoutError: If the service does not answer.
            ConnectionError: If the service is lost.
        """
        self._require_answer()
        jobs = context.context().coordination_service.coordinated_job_list
        with _as_builtin_errors("the states of all workers"):
            states = context.context().get_task_states([(job.name, job.num_tasks) for job in jobs])
        return [None if state is None else str(state) for state in states]

    def report(self, message: str) -> None:
        """Immediately aborts the collectives of all other workers with this message. Raises the
        same errors as `task_errors`."""
        self._require_answer()
        with _as_builtin_errors("a report to all workers"):
            context.context().report_error_to_cluster(tf.errors.UNAVAILABLE, message)

    def _require_answer(self) -> None:
        """Checks that the service answers.

        A request for task states to a frozen service blocks all Python threads (TensorFlow 2.18 to
        2.21), so a harmless request is sent first.
        """
        answers: queue.SimpleQueue[ConnectionError | None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                self.put_first("keras_distplug/asked", "")
                answers.put(None)
            except ConnectionError as error:
                answers.put(error)

        global _asking
        with _asking_lock:
            if _asking is not None:
                _asking.join(_ANSWER_S)  # do not start a second thread that may never end
            if _asking is None or not _asking.is_alive():
                _asking = threading.Thread(target=ask, name="keras_distplug-ask", daemon=True)
                _asking.start()
        try:
            error = answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise TimeoutError("TensorFlow's coordination service does not answer") from None
        if error is not None:
            raise error

    @property
    def heartbeat_timeout_s(self) -> float:
        set_ms = context.context().coordination_service.heartbeat_timeout_in_ms
        return set_ms / 1000 if set_ms else _HEARTBEAT_S


def _look_s() -> float:
    # The size of an answer grows with the number of workers, too.
    jobs = context.context().coordination_service.coordinated_job_list
    workers: int = sum(job.num_tasks for job in jobs)
    return _LOOK_S * max(1.0, workers / _LOOKS_WORKERS)


@contextmanager
def heartbeat_timeout(secs: float) -> Iterator[None]:
    """Sets the heartbeat timeout of a cluster that is formed within the `with` block.

    TensorFlow 2.18 to 2.21: MultiWorkerMirroredStrategy has no argument for it, and its default is
    10 s. It configures the coordination service unless that has already been done, but configuring
    it beforehand requires knowing the service's leader.
    """
    own = context.context()
    with _UPSTREAM.patched(
        own,
        "configure_coordination_service",
        functools.partial(
            own.configure_coordination_service, heartbeat_timeout_in_ms=int(secs * 1000)
        ),
    ):
        yield


@contextmanager
def _as_builtin_errors(key: str) -> Iterator[None]:
    try:
        yield
    except tf.errors.DeadlineExceededError as error:
        raise TimeoutError(f"{key}: {error.message}") from error
    except tf.errors.OpError as error:
        raise ConnectionError(f"{key}: {error.message}") from error


@contextmanager
def cpu_devices_per_worker(count: int) -> Iterator[None]:
    """Makes MultiWorkerMirroredStrategy use `count` logical CPU devices per worker.

    TensorFlow uses one CPU device per worker regardless of the logical configuration. Several
    devices help to try out several replicas per worker without GPUs.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )

    def local_devices(self: Any, cluster_resolver: Any, worker_device: str) -> Any:
        return tuple(f"{worker_device}/device:CPU:{i}" for i in range(count)), "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    with _UPSTREAM.patched(extended, "_initialize_local_devices", local_devices):
        yield
