"""Whether several workers, or several replicas, train together (Keras 3.10 to 3.15)."""

from __future__ import annotations

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    return bool(keras_trainer._collective_all_reduce_multi_worker(strategy))


def has_several_replicas(strategy: tf.distribute.Strategy) -> bool:
    return strategy.num_replicas_in_sync > 1 or is_multi_worker(strategy)


def replicas_here(strategy: tf.distribute.Strategy) -> int:
    """How many of the replicas are in this process."""
    return len(strategy.extended.worker_devices) if has_several_replicas(strategy) else 1
