"""Joins the cluster, and creates the strategy while TensorFlow still allows it."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import warnings

import tensorflow as tf

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.runtime import context, versions, workers
from keras_distplug.cluster import peers, ports, rendezvous, roles
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.log import announce
from keras_distplug.core.supervised import JOINED_BY, Phase, Supervised
from keras_distplug.core.timeouts import Timeouts
from keras_distplug.strategies import servers
from keras_distplug.strategies.select import Choice, choose

_AUTOMATIC = "KERAS_DISTPLUG_AUTO_INIT"  # "0" leaves joining to the script
_OF_CLUSTERS = ("multi_worker", "parameter_server")

_joined: dict[str, tf.distribute.Strategy] = {}
_joined_with: dict[str, Timeouts] = {}
_asked_for: list[str] = []  # the names given to `init`, the newest last


def init(
    strategy: str = "auto",
    *,
    heartbeat_timeout_secs: float | None = None,
    collective_timeout_secs: float | None = None,
) -> tf.distribute.Strategy:
    """Joins the cluster that the environment describes. Call it at the top of the script.

    TensorFlow forms a cluster only before the first tensor, model or dataset exists. Under
    `keras-distplug run`, importing `keras_distplug` calls `init` automatically. Without `init`,
    `distributed_fit` restarts TensorFlow and transfers model and data, if that is possible.

    Example:

    ```python
    import keras_distplug as kd
    kd.init()
    model = build_model()
    kd.distributed_fit(model, make_dataset())
    ```

    Args:
        strategy: `"auto"`, `"one_device"`, `"mirrored"`, `"central_storage"` (every device
            computes, the CPU holds the variables), `"multi_worker"` or `"parameter_server"`.
            Defaults to `"auto"`: `"parameter_server"` in a cluster with 'ps' tasks;
            `"multi_worker"` with several workers (TF_CONFIG, Slurm, Vertex AI, SageMaker or
            Kubernetes); `"mirrored"` with several GPUs; else `"one_device"`. After a call with a
            name, `"auto"` stands for that name, here and in `distributed_fit`.
        heartbeat_timeout_secs: Seconds without a heartbeat after which a worker counts as lost: at
            least 1, the same on all workers. Defaults to KERAS_DISTPLUG_HEARTBEAT_TIMEOUT, which
            `keras-distplug run --heartbeat-timeout` sets, or else to TensorFlow's 10.
        collective_timeout_secs: Seconds after which a step fails in which workers wait for each
            other: at least 1. Must be longer than the slowest step of the slowest worker, and
            longer than the work between two steps. Defaults to KERAS_DISTPLUG_COLLECTIVE_TIMEOUT,
            which `keras-distplug run --collective-timeout` sets, or else to no limit.

    Returns:
        The strategy; repeated calls return the same object. In a 'worker' or 'ps' task of a cluster
        with parameter servers, `init` never returns: the process serves the chief until SIGTERM
        ends it, or until the chief has been gone for five minutes (KERAS_DISTPLUG_CHIEF_GONE_SECS).

    Raises:
        ConfigurationError: If the strategy is unknown or does not fit the environment, or a timeout
            is invalid.
        ClusterError: If the workers were given different clusters or versions, or an address at
            which a worker cannot be reached.
        PeerLostError: If another worker failed before it joined, or did not start within an hour
            (KERAS_DISTPLUG_JOIN_TIMEOUT, in seconds).
    """
    joined = join(strategy, Timeouts(heartbeat_timeout_secs, collective_timeout_secs))
    if strategy != "auto":
        _asked_for.append(strategy)
    return joined


def join(strategy: str, given: Timeouts | None = None) -> tf.distribute.Strategy:
    """Does what `init` does, without changing the meaning of `"auto"`."""
    versions.check()
    given = given or Timeouts()
    timeouts = given.or_else(Timeouts.from_env(os.environ))
    role = roles.from_environment(os.environ)
    if strategy in ("auto", "multi_worker"):
        roles.require_not_numbered(os.environ)
    choice = _choose(strategy, role)
    if choice.name == "parameter_server":
        # Waits for a task that is being restarted, instead of failing immediately.
        os.environ["GRPC_FAIL_FAST"] = "use_caller"
        if role.is_server:
            if Supervised.from_env() is None:
                ports.require_free(role)
            report = functools.partial(_report_joined, role)
            servers.serve(role.cluster, role.task_type, role.index, report)  # never returns
    if choice.name not in _joined:
        _joined[choice.name] = _make(choice, role, timeouts)
        _joined_with[choice.name] = timeouts
        if role.is_chief:
            announce(f"strategy {choice.name} ({choice.reason}): {_size(choice, role)}")
        _report_joined(role)
    elif choice.name == "multi_worker" and (
        given.or_else(_joined_with[choice.name]) != _joined_with[choice.name]
    ):
        warnings.warn(
            "These timeouts are ignored, because this process has already joined the cluster with "
            f"different timeouts. Received: {timeouts}; in use: {_joined_with[choice.name]}. Pass "
            "them to the first call of `keras_distplug.init()`. Under `keras-distplug run`, where "
            "importing keras_distplug joins the cluster, pass --heartbeat-timeout and "
            "--collective-timeout.",
            stacklevel=3,
        )
    return _joined[choice.name]


def global_batch(per_replica: int, strategy: tf.distribute.Strategy | None = None) -> int:
    """Returns the size of a global batch in which every replica gets `per_replica` samples.

    Example:

    ```python
    kd.init()
    ds = ds.batch(kd.global_batch(64), drop_remainder=True)
    ```

    Args:
        per_replica: The number of samples of one replica in a step.
        strategy: The strategy whose replicas are counted. Defaults to the one in scope, or else to
            that of `init()`.

    Returns:
        `per_replica` times the number of replicas, over all workers.

    Raises:
        ConfigurationError: If `per_replica` is not a whole number of at least 1.
    """
    if isinstance(per_replica, bool) or not isinstance(per_replica, int) or per_replica < 1:
        raise ConfigurationError(
            "Expected `per_replica`, the number of samples per replica, to be a Python int of at "
            f"least 1. Received: {per_replica!r}"
        )
    return per_replica * _replicas(strategy)


def scaled_learning_rate(
    learning_rate: float, strategy: tf.distribute.Strategy | None = None
) -> float:
    """Returns the learning rate for a global batch that grows with the number of replicas.

    The linear scaling rule: a batch k times as large takes a learning rate k times as high, after a
    warm-up (`warmup_steps` of `keras.optimizers.schedules.CosineDecay`), for SGD-like optimizers.
    Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677. If the global batch stays
    the same, the learning rate does, too: the computation is that of one device.

    Example:

    ```python
    batch = kd.global_batch(64)
    optimizer = keras.optimizers.SGD(kd.scaled_learning_rate(0.1), momentum=0.9)
    ```

    Args:
        learning_rate: The learning rate for the batch of one replica.
        strategy: The strategy whose replicas are counted. Defaults to the one in scope, or else to
            that of `init()`.

    Returns:
        `learning_rate` times the number of replicas, over all workers.
    """
    return learning_rate * _replicas(strategy)


def _choose(strategy: str, role: roles.Role) -> Choice:
    if strategy == "auto" and _asked_for:
        strategy = _asked_for[-1]
    return choose(strategy, role, len(tf.config.list_physical_devices("GPU")))


def _replicas(strategy: tf.distribute.Strategy | None) -> int:
    if strategy is None:
        strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else join("auto")
    return int(strategy.num_replicas_in_sync)


def join_on_import() -> None:
    """Calls `init()` in a worker of a supervisor, unless it is too late or a subprocess."""
    if os.environ.get(_AUTOMATIC) == "0" or multiprocessing.parent_process() is not None:
        return
    if os.environ.setdefault(JOINED_BY, str(os.getpid())) != str(os.getpid()):
        return  # a subprocess of the worker
    if not needs_fresh_context("auto"):
        init()


def needs_fresh_context(strategy: str) -> bool:
    """True if TensorFlow is already in use, so that `init(strategy)` would come too late."""
    choice = _choose(strategy, roles.from_environment(os.environ))
    return choice.name in _OF_CLUSTERS and not _joined and context.is_initialized()


def get_name(strategy: tf.distribute.Strategy) -> str:
    """Returns the name of a strategy for `init`, or else the name of its class."""
    if workers.is_multi_worker(strategy):
        return "multi_worker"
    if workers.is_scheduled(strategy):
        return "parameter_server"
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        return "mirrored"
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
        return "central_storage"
    default = tf.distribute.get_strategy()
    is_default = strategy is default and not tf.distribute.has_strategy()
    return "one_device" if is_default else type(strategy).__name__


def _make(choice: Choice, role: roles.Role, timeouts: Timeouts) -> tf.distribute.Strategy:
    if choice.name == "mirrored":
        return tf.distribute.MirroredStrategy(_devices())
    if choice.name == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy(_devices(), "CPU:0")
    if choice.name not in _OF_CLUSTERS:
        return tf.distribute.get_strategy()
    os.environ["TF_CONFIG"] = role.to_tf_config()
    peers.watch()
    is_served = choice.name == "parameter_server"
    if Supervised.from_env() is None:  # a supervisor reports missing workers, and tries other ports
        _meet(role, is_served)
    strategy = _parameter_server() if is_served else _multi_worker(timeouts)
    trainer.install_dispatch()
    return strategy


def _meet(role: roles.Role, is_served: bool) -> None:
    if is_served:
        ports.require_free(role)
        rendezvous.await_servers(role)
    elif role.world_size > 1:
        rendezvous.meet(role, versions.installed())


def _multi_worker(timeouts: Timeouts) -> tf.distribute.Strategy:
    supervised = Supervised.from_env()
    devices = supervised.devices_per_worker if supervised else None
    with contextlib.ExitStack() as stack:
        if timeouts.heartbeat_secs is not None:
            stack.enter_context(context.heartbeat_timeout(timeouts.heartbeat_secs))
        if devices and not tf.config.list_physical_devices("GPU"):
            stack.enter_context(context.cpu_devices_per_worker(devices))
        return tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=tf.distribute.experimental.CommunicationOptions(
                timeout_seconds=timeouts.collective_secs
            )
        )


def _parameter_server() -> tf.distribute.Strategy:
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )
    if strategy.num_replicas_in_sync > 1:
        raise ConfigurationError(
            "Under ParameterServerStrategy, a worker must have at most one GPU. Received: workers "
            f"with {strategy.num_replicas_in_sync} GPUs. Start one worker per GPU, each with "
            "its own CUDA_VISIBLE_DEVICES."
        )
    return strategy


def _report_joined(role: roles.Role) -> None:
    if (supervised := Supervised.from_env()) is not None:
        supervised.report(role.name, Phase.JOINED)


def _size(choice: Choice, role: roles.Role) -> str:
    if choice.name == "parameter_server":
        workers, servers = len(role.cluster["worker"]), len(role.cluster["ps"])
        return f"{_counted(workers, 'worker')}, {_counted(servers, 'parameter server')}"
    replicas = _joined[choice.name].num_replicas_in_sync
    return f"{_counted(role.world_size, 'worker')}, {_counted(replicas, 'replica')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def _devices() -> list[str] | None:
    """Returns all GPUs or, without any, all logical CPUs (TensorFlow itself would use one)."""
    if tf.config.list_physical_devices("GPU"):
        return None
    return [device.name for device in tf.config.list_logical_devices("CPU")]
