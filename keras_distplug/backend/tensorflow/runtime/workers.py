"""Whether several workers, or several replicas, train together (Keras 3.10 to 3.15,
TensorFlow 2.18 to 2.21)."""

from __future__ import annotations

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from tensorflow.python.distribute import distribute_lib


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    return bool(keras_trainer._collective_all_reduce_multi_worker(strategy))


def is_scheduled(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process schedules steps that workers take each on its own."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def resolver_of(strategy: tf.distribute.Strategy) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Of one that has workers."""
    # ParameterServerStrategy has none under the public name.
    return strategy._cluster_resolver if is_scheduled(strategy) else strategy.cluster_resolver


def of_chief() -> tf.distribute.Strategy:
    """Under which the chief alone reads and computes: that of a single process."""
    return distribute_lib._get_default_strategy()


def has_several_replicas(strategy: tf.distribute.Strategy) -> bool:
    return strategy.num_replicas_in_sync > 1 or is_multi_worker(strategy)


def replicas_here(strategy: tf.distribute.Strategy) -> int:
    """How many of the replicas are in this process."""
    return len(strategy.extended.worker_devices) if has_several_replicas(strategy) else 1
