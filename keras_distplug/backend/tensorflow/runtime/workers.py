"""Questions about a strategy's workers and replicas (Keras 3.10 to 3.15, TensorFlow 2.18 to
2.21)."""

from __future__ import annotations

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from tensorflow.python.distribute import distribute_lib


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    return bool(keras_trainer._collective_all_reduce_multi_worker(strategy))


def is_scheduled(strategy: tf.distribute.Strategy) -> bool:
    """True if this process schedules steps that workers run independently."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def get_resolver(
    strategy: tf.distribute.Strategy,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Returns the cluster resolver of a strategy that has workers."""
    # ParameterServerStrategy does not set the public attribute.
    return strategy._cluster_resolver if is_scheduled(strategy) else strategy.cluster_resolver


def make_chief_strategy() -> tf.distribute.Strategy:
    """Returns the default strategy of a single process, under which only the chief computes."""
    return distribute_lib._get_default_strategy()


def has_several_replicas(strategy: tf.distribute.Strategy) -> bool:
    return strategy.num_replicas_in_sync > 1 or is_multi_worker(strategy)


def replicas_here(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of replicas in this process."""
    return len(strategy.extended.worker_devices) if has_several_replicas(strategy) else 1
