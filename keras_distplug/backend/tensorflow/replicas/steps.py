"""Steps of `fit`, `evaluate` and `predict` that several replicas run together.

Keras 3.10 to 3.15 and TensorFlow 2.18 to 2.21: the bugs of Keras' own steps are listed in
`trainer.py`. Patches outside the model (`losses.py`, `empty_batches.py`) are active only while a
step of the model is traced or run.

For every batch, a distributed iterator determines with an eager collective if any worker has data
left. The code around that collective is private; `_run_next_step` replaces it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import input_lib

from keras_distplug.backend.tensorflow.replicas import empty_batches, logs, losses, replica_state
from keras_distplug.backend.tensorflow.replicas.batches_ahead import (
    BatchesAhead,
    batches_ahead,
    fetch_full,
)
from keras_distplug.backend.tensorflow.replicas.share import count_samples, first_tensor, use_share
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached
from keras_distplug.backend.tensorflow.runtime.workers import is_multi_worker, replicas_here

OnData = Callable[[Any], Any]
# Takes and returns the numbers of samples, of replicas with data, and of steps ahead.
Sums = Callable[[int, int, int], tuple[Any, int, int]]
_MOST_STEPS_AHEAD = 2**16


def maker(model: keras.Model, logged: logs.Logged) -> Callable[[OnData], OnData]:
    """Returns a replacement for `_make_function`, which turns a `train_step` or `test_step` into a
    function of an iterator."""
    strategy = model.distribute_strategy
    several_workers = is_multi_worker(strategy)

    def _make_function(step_function: OnData) -> OnData:
        def of_replica(data: Any, total: Any) -> Any:
            data = keras.tree.map_structure(_hide_batch_size, data)
            with _after(data), use_share(data, total) as share:
                found = step_function(data)
                logged.note(found, share.results)
                found = keras.tree.map_structure(losses.scale_to_global, found)
                replica_state.merge_statistics(share)
                for finish in share.at_end:
                    finish()
            return logs.mean_over_workers(found) if several_workers else found

        def step(given: Any) -> Any:
            batch, total = given
            if not several_workers:
                total = tf.add_n(_samples(batch, strategy))
            with losses.sums_over_samples(model), losses.recorded():
                found = strategy.run(of_replica, args=(batch, total))
            return keras.tree.map_structure(
                lambda value: logs.mean(strategy.experimental_local_results(value)), found
            )

        on_data = _convert_optionals(model, step)
        on_batch = _for_any_batch(model, on_data)
        sums = _make_worker_sums(strategy) if several_workers else _local_sums
        # After an error in a function that workers run together, no collective works any more.
        stepwise = model.run_eagerly or several_workers
        on_next = (
            partial(_run_next_step, model, on_batch, sums)
            if stepwise
            else _fused_step(strategy, on_data, on_batch)
        )

        def function(iterator: Any) -> Any:
            if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
                batch = split(next(iterator), strategy)
                samples = sum(_sizes(strategy.experimental_local_results(first_tensor(batch))))
                total, *_ = sums(samples, 1, 0)
                found = on_batch((batch, total))
                found = model._get_metrics_result_or_logs(found)
                return keras.tree.map_structure(tf.convert_to_tensor, found)
            found = None
            for _ in range(model.steps_per_execution):
                try:
                    found = on_next(iterator)
                except tf.errors.OutOfRangeError:
                    if found is None:
                        raise
                    break
            return found

        return function

    return _make_function


def predict_maker(model: keras.Model) -> Callable[..., None]:
    """Returns a `make_predict_function` whose function accepts batches of any size."""
    stock, strategy = model.make_predict_function, model.distribute_strategy

    def make_predict_function(force: bool = False) -> None:
        if model.predict_function is not None and not force:
            return
        made = []
        for _ in range(2):
            stock(force=True)
            made.append(model.predict_function)
        usual, any_size = made

        def predict_function(batches: Any) -> Any:
            if all(_is_usual(batch, strategy) for batch in batches):
                return usual(batches)
            with empty_batches.patched_operations(strategy):
                return any_size(batches)

        model.predict_function = predict_function

    return make_predict_function


def data_dependent_train_step(model: keras.Model) -> Callable[[Any], Any]:
    stock = model.train_step

    def train_step(data: Any) -> Any:
        # XLA compiles the step into one operation, which waits for the data anyway; and the
        # creation of variables must not wait.
        if model.jit_compile:
            return stock(data)
        with _after(data):
            return stock(data)

    return train_step


@contextmanager
def _after(data: Any) -> Iterator[None]:
    """Makes all operations with side effects depend on `data`.

    TensorFlow inlines a step into the function that fetches the data, and there runs operations
    that do not depend on the data even without any. Making all operations wait would prevent
    TensorFlow from fusing some, such as a layer's product, bias and activation.
    """
    if tf.executing_eagerly():
        yield
        return
    tensors = [value for value in keras.tree.flatten(data) if isinstance(value, tf.Tensor)]
    here = [tf.identity(tensor).op for tensor in tensors]
    graph = tf.compat.v1.get_default_graph()
    known = len(graph.get_operations())
    yield
    for operation in graph.get_operations()[known:]:
        if operation.op_def.is_stateful and operation.type != "ReadVariableOp":
            operation._add_control_inputs(here)


def _convert_optionals(model: keras.Model, step: OnData) -> OnData:
    """Returns `step` for data in which Keras 3.11 and newer represent None by an empty optional."""
    as_it_is: OnData = tf.autograph.experimental.do_not_convert(step)
    convert = getattr(model, "_autoconvert_optionals", lambda function: function)
    converted: OnData = convert(as_it_is)
    return converted


def _for_any_batch(model: keras.Model, step: OnData) -> OnData:
    """Returns a step with two traces, the second one for the rare case of a replica without
    samples.

    The patches for that case prevent the fusion of operations. Workers may use different traces at
    the same time, because both contain the same collectives.
    """
    strategy = model.distribute_strategy
    usual, any_size = (step if model.run_eagerly else _traced_once(step) for _ in range(2))

    def on_batch(given: Any) -> Any:
        if _is_usual(given[0], strategy):
            return usual(given)
        with empty_batches.patched_operations(strategy):
            return any_size(given)

    return on_batch


def counted_alone(step: OnData) -> OnData:
    """Returns `step`, with its own count of traces.

    TensorFlow counts the traces of a code object, which the functions of all models share. It would
    warn of retracing once a process trains a few models, although it traces each model once.
    """
    counted: Any = functools.partial(step)
    counted.__name__ = getattr(step, "__name__", "step")  # for profiles and messages
    made: OnData = counted
    return made


def _traced_once(step: OnData) -> OnData:
    """Returns a function of batches whose trace does not depend on the size of the first batch.

    TensorFlow would trace the step for batches of the first size, and again for any size once it
    meets a second size. The results differ in their last bits, and a resumed training starts with a
    different batch.
    """
    function = tf.function(counted_alone(step), reduce_retracing=True)
    traced: set[Any] = set()

    def on_batch(batch: Any) -> Any:
        specs = [_spec_of_any_size(value) for value in tf.nest.flatten(batch)]
        key = tuple(specs)
        if key not in traced:
            traced.add(key)
            if NotImplemented not in specs:
                function.get_concrete_function(tf.nest.pack_sequence_as(batch, specs))
        return function(batch)

    return on_batch


def _spec_of_any_size(value: Any) -> Any:
    """Returns the spec of a value with any batch size; NotImplemented if it does not consist of
    plain tensors."""
    if value is None:
        return None
    if isinstance(value, tf.Tensor):
        shape = value.shape
        return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, value.dtype)
    if isinstance(value, tf.distribute.DistributedValues):
        parts = [_spec_of_any_size(part) for part in value.values]
        if NotImplemented not in parts:
            return type(value._type_spec)(*parts)
    return NotImplemented


class _FetchListeners(list[Callable[[float], None]]):
    """The fetch listeners attached to a model."""


def add_fetch_listener(model: keras.Model, on_fetch: Callable[[float], None]) -> None:
    """Calls `on_fetch` with the seconds that this worker has waited for its own data, if the
    workers of `model` then synchronize."""
    listeners = attached(model, _FetchListeners) or _FetchListeners()
    listeners.append(on_fetch)
    attach(model, listeners)


def remove_fetch_listener(model: keras.Model, on_fetch: Callable[[float], None]) -> None:
    if (listeners := attached(model, _FetchListeners)) is not None:
        listeners.remove(on_fetch)


def _run_next_step(model: keras.Model, on_batch: OnData, sums: Sums, iterator: Any) -> Any:
    """Runs a step with the next batch, unless no replica of any worker has data left.

    TensorFlow's iterator would exchange this information between the workers, and the step would
    then exchange numbers of samples. Here, one collective does both, and it is traced only once.
    Where all workers know that they have full batches for the next steps, they agree only once.
    """
    ahead = batches_ahead(iterator)
    is_agreed = ahead.agreed > 0
    start_s = time.perf_counter()
    fetched = fetch_full(iterator, ahead) if is_agreed else _fetch_optionals(iterator)
    waited_s = time.perf_counter() - start_s
    for on_fetch in list(attached(model, _FetchListeners) or ()):
        on_fetch(waited_s)
    parts, total = (fetched, ahead.total) if is_agreed else _agree(iterator, ahead, fetched, sums)
    ahead.own, ahead.agreed = max(0, ahead.own - 1), max(0, ahead.agreed - 1)
    if iterator._replica_order is not None:
        parts = iterator._reorder_replicas(parts)
    return on_batch((input_lib._create_per_replica(parts, model.distribute_strategy), total))


def _fetch_optionals(iterator: Any) -> list[Any]:
    return [own.get_next_as_optional_list() for own in iterator._iterators]


def _agree(
    iterator: Any, ahead: BatchesAhead, optionals: Sequence[Any], sums: Sums
) -> tuple[list[Any], Any]:
    """Returns the batches of this worker's replicas, and the number of samples on all workers."""
    there = [bool(each.has_value()) for of_device in optionals for each in of_device]
    parts = input_lib._get_value_or_dummy(
        iterator._input_workers, optionals, produce_dummy=not all(there)
    )
    for place, is_there in enumerate(there):
        if not is_there:
            parts[place] = tf.nest.map_structure(_without_samples, parts[place])
    own = int(min(ahead.own, _MOST_STEPS_AHEAD))
    total, with_data, agreed = sums(sum(_sizes(parts)), sum(there), own)
    if not with_data:
        raise tf.errors.OutOfRangeError(None, None, "End of sequence")
    ahead.agreed, ahead.total = agreed, total
    return parts, total


def _without_samples(dummy: Any) -> Any:
    """Removes samples from a TensorFlow dummy, which may have some if the size is unknown."""
    return dummy[:0] if isinstance(dummy, tf.Tensor) else dummy


def _make_worker_sums(strategy: tf.distribute.Strategy) -> Sums:
    """Returns a function of three numbers of this worker that returns the sums over all workers of
    the first two; the third number if it is the same on all workers, and otherwise 0."""
    workers = strategy.num_replicas_in_sync // replicas_here(strategy)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def summed(numbers: tf.Tensor) -> Any:
        # They are the same if the mean of their squares is the square of their mean.
        numbers = tf.concat([numbers, numbers[2:] ** 2], 0)
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, numbers, axis=None)
        samples, there, number, square = tf.unstack(total)
        is_same = workers * square == number**2
        return tf.cast(samples, tf.float32), there, tf.where(is_same, number / workers, 0)

    # Sums of squares are exact for numbers up to _MOST_STEPS_AHEAD.
    signature = [tf.TensorSpec([3], tf.float64)]
    function = tf.function(counted_alone(summed), input_signature=signature)

    def sums(*numbers: int) -> tuple[Any, int, int]:
        total, there, same = function(tf.constant(numbers, tf.float64))
        return total, int(there), int(same)

    return sums


def _local_sums(samples: int, there: int, same: int) -> tuple[None, int, int]:
    return None, there, 0  # the step itself counts the samples


def _fused_step(strategy: tf.distribute.Strategy, step: OnData, on_batch: OnData) -> OnData:
    """Fetches a batch and runs its step in the same call, unless a replica has no samples.

    Fetching in a separate call takes one or two milliseconds.
    """

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def next_step(iterator: Any) -> Any:
        batch = iterator.get_next()
        done = _is_usual(batch, strategy)
        # The batch is returned so that it stays in use until the step ends. Otherwise, TensorFlow
        # 2.21 computes in its memory, which for a generator is the memory of the user's arrays.
        return _compute_if(done, lambda: step((batch, None))), batch, done

    function = tf.function(counted_alone(next_step), reduce_retracing=True)

    def on_next(iterator: Any) -> Any:
        found, batch, done = function(iterator)
        return found if done else on_batch((batch, None))

    return on_next


def _compute_if(condition: Any, compute: Callable[[], Any]) -> Any:
    """Returns the result of `compute` if `condition` is true, or else zeros of its structure."""
    if condition is True:
        return compute()
    made = []

    def computed() -> Any:
        made.append(compute())
        return made[0]

    return tf.cond(condition, computed, lambda: tf.nest.map_structure(_zeros_like, *made))


def _zeros_like(value: Any) -> Any:
    if not tf.is_tensor(value):
        return value
    return tf.nest.map_structure(
        lambda part: tf.zeros([size or 0 for size in part.shape], part.dtype),
        value,
        expand_composites=True,
    )


def _is_usual(batch: Any, strategy: tf.distribute.Strategy) -> Any:
    """True if Keras computes a step of `batch` correctly without patches."""
    if not empty_batches.need_patches(strategy):
        return True
    sizes = [part.shape[0] for part in strategy.experimental_local_results(first_tensor(batch))]
    if None not in sizes:
        return all(sizes)
    return tf.reduce_all(tf.stack(_samples(batch, strategy)) > 0)


def _sizes(parts: Sequence[Any]) -> list[int]:
    """Returns the numbers of samples in the parts of a batch."""
    return [int(first_tensor(part).shape[0]) for part in parts]


def _samples(batch: Any, strategy: tf.distribute.Strategy) -> list[tf.Tensor]:
    """Returns the numbers of samples on the replicas in this process."""
    return [
        count_samples(part) for part in strategy.experimental_local_results(first_tensor(batch))
    ]


def _hide_batch_size(value: Any) -> Any:
    """Hides the number of samples from the trace, as a dataset's iterator does inside a function.

    Keras weights the losses of single outputs by that number if it is known, and otherwise by 1.
    """
    if tf.executing_eagerly() or not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])


def split(batch: Any, strategy: tf.distribute.Strategy) -> Any:
    """Splits a global batch, which every worker has as a whole, over the replicas."""
    replicas = strategy.num_replicas_in_sync
    a_worker = len(strategy.extended.worker_devices)

    def part(value: Any) -> Any:
        value = value if isinstance(value, tf.SparseTensor) else tf.convert_to_tensor(value)
        samples = value.shape[0]

        def of_replica(context: tf.distribute.ValueContext) -> Any:
            place = context.replica_id_in_sync_group
            if is_multi_worker(strategy):  # the order in which Keras concatenates outputs
                place = place % a_worker * (replicas // a_worker) + place // a_worker
            return value[samples * place // replicas : samples * (place + 1) // replicas]

        return strategy.experimental_distribute_values_from_function(of_replica)

    return keras.tree.map_structure(lambda value: None if value is None else part(value), batch)
