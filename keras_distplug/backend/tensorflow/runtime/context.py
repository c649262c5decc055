"""TensorFlow's eager context: may a cluster still be formed, starting afresh, the key-value store.

TensorFlow 2.18 to 2.21. "Collective ops must be configured at program startup"
(tensorflow/tensorflow#35297): MultiWorkerMirroredStrategy cannot be made once any tensor exists.
`_reset_context` drops the context so that it can; whatever lived in the old one is dead.
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

_HEARTBEAT_S = 10.0  # TensorFlow's own time-out
_ANSWER_S = 1.0  # for the service, which may be frozen
_LOOK_S = 1.0  # how often who waits for a word looks whether all workers are there,
_LOOKS_WORKERS = 64  # up to so many; of more, so seldom that all together look as often


def is_initialized() -> bool:
    """True once a tensor, variable or dataset exists, which is too late to form a cluster."""
    return context.context()._context_handle is not None


def in_cluster() -> bool:
    """True once this process has formed a cluster with others."""
    service = context.context().coordination_service
    return is_initialized() and service is not None and bool(service.coordinated_job_list)


def global_seed() -> int | None:
    """What `tf.random.set_seed` was given; None if it was not called."""
    seed: int | None = context.global_seed()
    return seed


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Makes operations as if `tf.random.set_seed` had been given `seed`."""
    there = context.context()
    before = there._seed, there._rng
    there._seed, there._rng = seed, random.Random(seed)
    try:
        yield
    finally:
        there._seed, there._rng = before


def reset() -> None:
    """Starts TensorFlow afresh with the user's settings. Tensors, variables and datasets made
    before are dead: touching one may crash the process."""
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
    """The coordination service's key-value store. Never a collective: safe at any moment."""

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
        # The service lets who waits for the word of a lost worker wait (TensorFlow 2.18 to 2.21).
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
        """`key`, and all keys below it: `a` with `a/b`."""
        with _as_builtin_errors(key):
            context.context().delete_config_key_value(key)

    def barrier(self, key: str, timeout_s: float) -> None:
        with _as_builtin_errors(key):
            context.context().wait_at_barrier(key, int(timeout_s * 1000))

    def _first_error(self) -> str | None:
        with contextlib.suppress(TimeoutError):  # who is frozen may come back
            return next(filter(None, self.task_errors()), None)
        return None

    def task_errors(self) -> list[str | None]:
        """What is wrong with each worker, as the service knows it; the chief comes first.

        Raises:
            TimeoutError: If the service does not answer.
            ConnectionError: If it is gone.
        """
        self._require_answer()
        jobs = context.context().coordination_service.coordinated_job_list
        with _as_builtin_errors("the states of all workers"):
            states = context.context().get_task_states([(job.name, job.num_tasks) for job in jobs])
        return [None if state is None else str(state) for state in states]

    def report(self, message: str) -> None:
        """Ends the collectives of all other workers with this message, at once. Raises like
        `task_errors`."""
        self._require_answer()
        with _as_builtin_errors("a report to all workers"):
            context.context().report_error_to_cluster(tf.errors.UNAVAILABLE, message)

    def _require_answer(self) -> None:
        """Who asks a frozen service for states lets no other thread of Python run (TensorFlow 2.18
        to 2.21), so it is asked for something else before."""
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
                _asking.join(_ANSWER_S)  # one that never comes back is enough
            if _asking is None or not _asking.is_alive():
                _asking = threading.Thread(target=ask, name="keras_distplug-ask", daemon=True)
                _asking.start()
        try:
            error = answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise TimeoutError("the coordination service does not answer") from None
        if error is not None:
            raise error

    @property
    def heartbeat_timeout_s(self) -> float:
        set_ms = context.context().coordination_service.heartbeat_timeout_in_ms
        return set_ms / 1000 if set_ms else _HEARTBEAT_S


def _look_s() -> float:
    # What is told of the workers' states grows with their number, too.
    jobs = context.context().coordination_service.coordinated_job_list
    workers: int = sum(job.num_tasks for job in jobs)
    return _LOOK_S * max(1.0, workers / _LOOKS_WORKERS)


@contextmanager
def heartbeat_timeout(secs: float) -> Iterator[None]:
    """Gives the coordination service of the cluster that is formed meanwhile this time-out.

    TensorFlow 2.18 to 2.21: MultiWorkerMirroredStrategy has no argument for it; its own is 10 s. It
    configures the service unless somebody has, but then that has to know who keeps it, too.
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
    """Makes MultiWorkerMirroredStrategy use `count` logical CPU devices on each worker.

    TensorFlow takes one CPU device a worker, whatever the logical configuration; several are of use
    for trying out several replicas a worker without GPUs.
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
