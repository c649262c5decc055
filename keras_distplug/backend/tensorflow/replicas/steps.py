"""Steps of `fit`, `evaluate` and `predict` that several replicas take together.

Keras 3.10 to 3.15 and TensorFlow 2.18 to 2.21: what is wrong with Keras' own is listed in
`trainer.py`. What has to be mended outside of the model (`losses.py`,
`empty_batches.py`) is so for as long as a step of it is traced or run.

A distributed iterator asks all workers for each batch whether anybody has one, by an eager
collective. What it would do around that is private: `_fetched` does it here.
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
from keras_distplug.backend.tensorflow.replicas.share import first_of, samples_of, share_of
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached
from keras_distplug.backend.tensorflow.runtime.workers import is_multi_worker

OnData = Callable[[Any], Any]


def maker(model: keras.Model, logged: logs.Logged) -> Callable[[OnData], OnData]:
    """What makes a function of an iterator from a `train_step` or `test_step`."""
    strategy = model.distribute_strategy
    several_workers = is_multi_worker(strategy)

    def _make_function(step_function: OnData) -> OnData:
        def of_replica(data: Any, total: Any) -> Any:
            data = keras.tree.map_structure(_of_any_batch_size, data)
            with _after(data), share_of(data, total) as share:
                found = step_function(data)
                logged.note(found, share.results)
                found = keras.tree.map_structure(losses.of_all_replicas, found)
                replica_state.bring_together(share)
                for finish in share.at_end:
                    finish()
            return logs.mean_over_workers(found) if several_workers else found

        def step(given: Any) -> Any:
            batch, total = given
            if not several_workers:
                total = tf.add_n(_samples(batch, strategy))
            with losses.sums_over_samples(model), losses.noted():
                found = strategy.run(of_replica, args=(batch, total))
            return keras.tree.map_structure(
                lambda value: logs.mean(strategy.experimental_local_results(value)), found
            )

        on_data = _converted(model, step)
        on_batch = _for_any_batch(model, on_data)
        sums = _over_workers(strategy) if several_workers else _of_one_process
        # An error in a function that workers run together leaves no collective working.
        stepwise = model.run_eagerly or several_workers
        on_next = (
            partial(_fetched, model, on_batch, sums)
            if stepwise
            else _in_one_call(strategy, on_data, on_batch)
        )

        def function(iterator: Any) -> Any:
            if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
                batch = split(next(iterator), strategy)
                samples = sum(_sizes(strategy.experimental_local_results(first_of(batch))))
                total, _ = sums(samples, 1)
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
    """`make_predict_function`, of a function that takes batches of any size."""
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
            with empty_batches.computed_right(strategy):
                return any_size(batches)

        model.predict_function = predict_function

    return make_predict_function


def only_with_data(model: keras.Model) -> Callable[[Any], Any]:
    stock = model.train_step

    def train_step(data: Any) -> Any:
        # XLA compiles the step into one operation, which waits for the data; and variables that are
        # made in it must not.
        if model.jit_compile:
            return stock(data)
        with _after(data):
            return stock(data)

    return train_step


@contextmanager
def _after(data: Any) -> Iterator[None]:
    """Lets nothing that leaves a trace happen without `data`.

    TensorFlow inlines a step into the function that asks for data, and there runs what does not
    depend on them although there are none. To make all operations wait would keep TensorFlow from
    making one of several, such as a layer's product, bias and activation.
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


def _converted(model: keras.Model, step: OnData) -> OnData:
    """For data in which Keras 3.11 and newer has an empty optional for None."""
    as_it_is: OnData = tf.autograph.experimental.do_not_convert(step)
    convert = getattr(model, "_autoconvert_optionals", lambda function: function)
    converted: OnData = convert(as_it_is)
    return converted


def _for_any_batch(model: keras.Model, step: OnData) -> OnData:
    """Two traces of a step, the second for a replica without samples, which is seldom needed.

    What Keras is mended with for that costs its operations their fusion. Workers may take different
    ones: both have the same collectives.
    """
    strategy = model.distribute_strategy
    usual, any_size = (step if model.run_eagerly else _traced_once(step) for _ in range(2))

    def on_batch(given: Any) -> Any:
        if _is_usual(given[0], strategy):
            return usual(given)
        with empty_batches.computed_right(strategy):
            return any_size(given)

    return on_batch


def _counted_alone(step: OnData) -> OnData:
    """Returns `step`, with its own count of traces.

    TensorFlow counts the traces of a code object, which the functions of all models share. It would
    warn of retracing once a process trains a few models, each of which is traced once.
    """
    counted: OnData = functools.partial(step)
    return counted


def _traced_once(step: OnData) -> OnData:
    """A function of batches whose trace does not depend on how many samples the first one has.

    TensorFlow makes one for batches of that size, and another for those of any size once a second
    size comes. They differ in the last bits, and a training that goes on begins with another batch.
    """
    function = tf.function(_counted_alone(step), reduce_retracing=True)
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
    """NotImplemented for what is not made of plain tensors."""
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
    """Those of a model."""


def hear_of_fetches(model: keras.Model, on_fetch: Callable[[float], None]) -> None:
    """Has `on_fetch` called with how many seconds this worker has waited for its own data, where
    the workers of `model` then wait for each other to have some."""
    listeners = attached(model, _FetchListeners) or _FetchListeners()
    listeners.append(on_fetch)
    attach(model, listeners)


def hear_no_more_of_fetches(model: keras.Model, on_fetch: Callable[[float], None]) -> None:
    if (listeners := attached(model, _FetchListeners)) is not None:
        listeners.remove(on_fetch)


def _fetched(
    model: keras.Model, on_batch: OnData, sums: Callable[[int, int], Any], iterator: Any
) -> Any:
    """Takes a step with the next batch, unless no replica of any worker has one left.

    TensorFlow's iterator would have the workers tell each other that, and then the step how many
    samples they have. Here it is one collective for both, which is traced once.
    """
    begun_s = time.perf_counter()
    optionals = [own.get_next_as_optional_list() for own in iterator._iterators]
    taken_s = time.perf_counter() - begun_s
    for on_fetch in list(attached(model, _FetchListeners) or ()):
        on_fetch(taken_s)
    there = [bool(each.has_value()) for of_device in optionals for each in of_device]
    parts = input_lib._get_value_or_dummy(
        iterator._input_workers, optionals, produce_dummy=not all(there)
    )
    for place, is_there in enumerate(there):
        if not is_there:
            parts[place] = tf.nest.map_structure(_without_samples, parts[place])
    total, with_data = sums(sum(_sizes(parts)), sum(there))
    if not with_data:
        raise tf.errors.OutOfRangeError(None, None, "End of sequence")
    if iterator._replica_order is not None:
        parts = iterator._reorder_replicas(parts)
    return on_batch((input_lib._create_per_replica(parts, model.distribute_strategy), total))


def _without_samples(dummy: Any) -> Any:
    """TensorFlow's may have samples where they are of a size that is not known."""
    return dummy[:0] if isinstance(dummy, tf.Tensor) else dummy


def _over_workers(strategy: tf.distribute.Strategy) -> Callable[[int, int], Any]:
    """Two numbers of this worker -> the sums over all of them."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def summed(numbers: tf.Tensor) -> Any:
        return tf.unstack(strategy.reduce(tf.distribute.ReduceOp.SUM, numbers, axis=None))

    signature = [tf.TensorSpec([2], tf.float32)]
    function = tf.function(_counted_alone(summed), input_signature=signature)
    return lambda *numbers: function(tf.constant(numbers, tf.float32))


def _of_one_process(samples: int, there: int) -> tuple[None, int]:
    return None, there  # the step counts its samples by itself


def _in_one_call(strategy: tf.distribute.Strategy, step: OnData, on_batch: OnData) -> OnData:
    """Fetches a batch and takes its step in the same call, unless a replica has no samples.

    A call of its own to fetch takes a millisecond or two.
    """

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def next_step(iterator: Any) -> Any:
        batch = iterator.get_next()
        done = _is_usual(batch, strategy)
        # The batch is given back so that it is in use until the step ends. TensorFlow 2.21 else
        # computes in its memory, which is that of the user's arrays where a generator gives them.
        return _if(done, lambda: step((batch, None))), batch, done

    function = tf.function(_counted_alone(next_step), reduce_retracing=True)

    def on_next(iterator: Any) -> Any:
        found, batch, done = function(iterator)
        return found if done else on_batch((batch, None))

    return on_next


def _if(condition: Any, compute: Callable[[], Any]) -> Any:
    """What `compute` gives, or anything of the same structure."""
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
    """Whether Keras computes a step of `batch` right as it is."""
    if not empty_batches.go_wrong(strategy):
        return True
    sizes = [part.shape[0] for part in strategy.experimental_local_results(first_of(batch))]
    if None not in sizes:
        return all(sizes)
    return tf.reduce_all(tf.stack(_samples(batch, strategy)) > 0)


def _sizes(parts: Sequence[Any]) -> list[int]:
    """How many samples each part of a batch has."""
    return [int(first_of(part).shape[0]) for part in parts]


def _samples(batch: Any, strategy: tf.distribute.Strategy) -> list[tf.Tensor]:
    """How many samples each replica in this process has."""
    return [samples_of(part) for part in strategy.experimental_local_results(first_of(batch))]


def _of_any_batch_size(value: Any) -> Any:
    """Hides the number of samples from the trace, as a dataset's iterator does inside a function.

    Keras weights the losses of single outputs by it where it is known, and by 1 where it is not.
    """
    if tf.executing_eagerly() or not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])


def split(batch: Any, strategy: tf.distribute.Strategy) -> Any:
    """Gives each replica its part of a global batch that every worker has as a whole."""
    replicas = strategy.num_replicas_in_sync
    a_worker = len(strategy.extended.worker_devices)

    def part(value: Any) -> Any:
        value = value if isinstance(value, tf.SparseTensor) else tf.convert_to_tensor(value)
        samples = value.shape[0]

        def of_replica(context: tf.distribute.ValueContext) -> Any:
            place = context.replica_id_in_sync_group
            if is_multi_worker(strategy):  # the order in which Keras brings outputs together
                place = place % a_worker * (replicas // a_worker) + place // a_worker
            return value[samples * place // replicas : samples * (place + 1) // replicas]

        return strategy.experimental_distribute_values_from_function(of_replica)

    return keras.tree.map_structure(lambda value: None if value is None else part(value), batch)
