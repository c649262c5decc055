"""The batches that an iterator is known to have, so that workers need not agree on each of them.

TensorFlow 2.18 to 2.21: the parts of a distributed iterator are private.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.share import first_tensor
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached
from keras_distplug.core.errors import DataError


@dataclass
class BatchesAhead:
    """The next batches of an iterator.

    Args:
        own: Steps for which every replica of this worker has a batch, all of the same size; may be
            infinite.
        agreed: Steps for which this is true of all workers.
        total: The number of samples in each of these global batches.
    """

    own: float
    agreed: int = 0
    total: Any = None


def batches_ahead(iterator: Any) -> BatchesAhead:
    """Returns what is known of a distributed iterator. The first call precedes its first batch."""
    if (ahead := attached(iterator, BatchesAhead)) is None:
        steps = [_count(own, iterator._cardinality) for own in iterator._iterators]
        ahead = BatchesAhead(min(steps))
        attach(iterator, ahead)
    return ahead


def fetch_full(iterator: Any, ahead: BatchesAhead) -> list[Any]:
    """Returns the next batches of this worker's replicas.

    Raises:
        DataError: If there are none: the other workers would wait in the collectives of a step.
    """
    try:
        return [batch for own in iterator._iterators for batch in own.get_next_as_list()]
    except tf.errors.OutOfRangeError as error:
        raise DataError(
            f"Expected {ahead.agreed} more batches, as the cardinality of the dataset says. "
            "Received: the end of the data. End the pipeline with `assert_cardinality` and the "
            "real number of batches."
        ) from error


def _count(own: Any, global_batches: int) -> float:
    """Returns the number of steps with full batches; 0 if unknown.

    Args:
        own: The part of an iterator that reads a worker's dataset.
        global_batches: The cardinality of the dataset that was split over the workers.
    """
    shape = first_tensor(own._element_spec).shape
    if not shape.rank or shape[0] is None:
        return 0
    batches, replicas = int(own._dataset.cardinality()), len(own._devices)
    if batches == tf.data.UNKNOWN_CARDINALITY and _splits_batches(own._dataset):
        batches, replicas = int(global_batches), 1
    if batches == tf.data.INFINITE_CARDINALITY:
        return math.inf
    return max(0, batches) // replicas


def _splits_batches(dataset: tf.data.Dataset) -> bool:
    """True if every worker gets a part of every global batch."""
    chosen = dataset.options().experimental_distribute.auto_shard_policy
    return bool(chosen == tf.data.experimental.AutoShardPolicy.DATA)
