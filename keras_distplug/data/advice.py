"""Suggests improvements for a tf.data pipeline, as far as the pipeline itself shows the need.

A wrong suggestion costs more than a missing one: whether a map is slow, whether samples fit into
memory, or whether their order is intended cannot be seen here, so none of these is reported. No
advice is needed for TensorFlow's own optimizations (it runs maps in parallel, and prefetches).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.input import pipeline
from keras_distplug.backend.tensorflow.input.pipeline_steps import Step

# Every output element comes from one input element.
_ONE_TO_ONE = re.compile(
    r"((Parallel)?Map|Prefetch|Options|Shuffle|ShuffleAndRepeat|Repeat|Cache|Take|Skip|Filter"
    r"|ParallelFilter|AssertCardinality|Shard)Dataset(V\d)?"
)
_SHUFFLES = re.compile(r"Shuffle(AndRepeat)?Dataset(V\d)?")
_FETCHES_AHEAD = re.compile(r"(Prefetch|Parallel\w+|MapAndBatch)Dataset(V\d)?")
_READS_FILES = re.compile(r"(TFRecord|TextLine|FixedLengthRecord|CSV)Dataset(V\d)?")
_DECODES = re.compile(r"Decode(Jpeg|AndCropJpeg|Png|Gif|Bmp|Image|WebP|Wav)")
_SMALL_BYTES = 512 * 2**20  # fits into the memory of any machine


def advise(
    parts: pipeline.Pipeline, dataset: tf.data.Dataset, *, workers: int, epochs: int
) -> list[str]:
    """Returns one line per suggested change.

    Example:

    ```python
    advise(read(ds.batch(8).shuffle(100)), ..., workers=1, epochs=2)
    # ["`shuffle` comes after `batch`, so ..."]
    ```

    Args:
        parts: The pipeline of `dataset`.
        dataset: The dataset of global batches.
        workers: Number of processes that read it.
        epochs: Number of times that it is read.
    """
    return [
        *_shuffled_batches(parts),
        *_small_buffer(parts, dataset),
        *(_kept_order(parts) if epochs > 1 else ()),
        *(_decoded_again(parts, dataset) if epochs > 1 else ()),
        *_few_files(parts, workers),
    ]


def lacks_prefetch(parts: pipeline.Pipeline) -> bool:
    """Returns True if a pipeline prepares no batch while a step computes, but could.

    TensorFlow adds a prefetch to every pipeline that does not end with one, unless autotuning is
    off. If the user disables it (`inject_prefetch=False`), none is added. Functions that keep a
    state might share it with training.
    """
    options = parts.options
    last = next(step for step in parts.chain if step.op != "OptionsDataset")
    return (
        options.autotune.enabled is False
        and options.experimental_optimization.inject_prefetch is not False
        and not _FETCHES_AHEAD.fullmatch(last.op)
        and all(step.pure for step in parts.steps)
    )


PREFETCHED = (
    "`options.autotune.enabled=False` keeps TensorFlow from prefetching, so a `prefetch(1)` is "
    "added here. Write one at the end of the pipeline"
)


def _shuffled_batches(parts: pipeline.Pipeline) -> Iterator[str]:
    above, batch, below = _split_at_batch(parts)
    if batch is None or batch.numbers.get("batch_size", 1) == 1:
        return
    if any(map(_shuffles, above)) and not any(map(_shuffles, below)):
        yield (
            "`shuffle` comes after `batch`, so whole batches change places, and every batch holds "
            "the same samples in every epoch. Put it before `batch`"
        )


def _small_buffer(parts: pipeline.Pipeline, dataset: tf.data.Dataset) -> Iterator[str]:
    _, batch, below = _split_at_batch(parts)
    if batch is None or int(dataset.cardinality().numpy()) in (0, 1, tf.data.UNKNOWN_CARDINALITY):
        return
    # Before a transformation that creates samples, such as `interleave`, files are shuffled.
    samples = list(itertools.takewhile(_is_one_to_one, below))
    shuffles = [step for step in samples if _shuffles(step)]
    if not shuffles or sum(map(_shuffles, parts.steps)) > 1:
        return
    buffer, size = shuffles[0].numbers.get("buffer_size", 0), batch.numbers.get("batch_size", 0)
    if 0 < buffer < size:
        yield (
            f"`shuffle(buffer_size={buffer})` mixes only {buffer} neighboring samples, fewer than "
            f"the {size} of a batch. Give it a buffer of many batches"
        )


def _kept_order(parts: pipeline.Pipeline) -> Iterator[str]:
    kept = parts.cached()
    shuffles = [step for step in parts.steps if _shuffles(step)]
    if shuffles and all(step.node in kept and step.reshuffles for step in shuffles):
        yield (
            "`shuffle` comes before `cache`, which keeps the order of the first epoch for all "
            "later ones. Put it after `cache`"
        )


def _decoded_again(parts: pipeline.Pipeline, dataset: tf.data.Dataset) -> Iterator[str]:
    if any(step.op.startswith(("CacheDataset", "Snapshot")) for step in parts.steps):
        return
    size = _sum_bytes(parts, dataset)
    if size is None or size > _SMALL_BYTES:
        return
    for step in parts.steps:
        found = sorted(op for op in step.calls if _DECODES.fullmatch(op))
        if found and step.pure:
            yield (
                f"`{step.title}` decodes the same files in every epoch ({', '.join(found)}), and "
                f"its results take only {max(1, size // 2**20)} MB. Put `cache()` after it, and "
                "random steps, such as `shuffle`, after that"
            )


def _few_files(parts: pipeline.Pipeline, workers: int) -> Iterator[str]:
    policy = parts.options.experimental_distribute.auto_shard_policy
    if workers == 1 or policy != tf.data.experimental.AutoShardPolicy.FILE:
        return
    if not any(_READS_FILES.fullmatch(op) for step in parts.steps for op in step.calls):
        return
    sources = [step for step in parts.steps if not step.inputs]
    files = sources[0].samples if len(sources) == 1 else None
    if files is not None and files < workers:
        yield (
            f"`AutoShardPolicy.FILE` needs a file for every worker, but there are {files} for "
            f"{workers} workers. Remove the policy: then every global batch is split"
        )


def _split_at_batch(parts: pipeline.Pipeline) -> tuple[list[Step], Step | None, list[Step]]:
    """Returns the steps after the one that makes global batches, that one, and those before it."""
    chain = list(parts.chain)
    above = list(itertools.takewhile(_is_one_to_one, chain))
    rest = chain[len(above) :]
    if not rest or rest[0] != parts.global_batch:
        return above, None, []
    return above, rest[0], rest[1:]


def _sum_bytes(parts: pipeline.Pipeline, dataset: tf.data.Dataset) -> int | None:
    """Returns the size of all samples in bytes; None if unknown."""
    batches, batch = int(dataset.cardinality().numpy()), parts.global_batch
    if batches < 0 or batch is None:
        return None
    total = 0
    for spec in keras.tree.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is None or shape.rank is None or None in shape[1:] or not spec.dtype.size:
            return None
        total += math.prod(shape[1:]) * spec.dtype.size
    return batches * batch.numbers["batch_size"] * total


def _is_one_to_one(step: Step) -> bool:
    return _ONE_TO_ONE.fullmatch(step.op) is not None


def _shuffles(step: Step) -> bool:
    return _SHUFFLES.fullmatch(step.op) is not None
