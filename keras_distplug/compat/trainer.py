"""`fit`, `evaluate` and `predict` of Keras 3 under a strategy of several replicas.

What is wrong upstream (Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21; keras-team/keras#20585,
tensorflow/tensorflow#72388, ray-project/ray#47464), besides what `compat/losses.py`,
`compat/optimizers.py` and `compat/replica_state.py` list:

- `TensorFlowTrainer._maybe_symbolic_build` reduces the per-replica structure of the first batch
  with `strategy.reduce`, which raises ValueError on several workers.
- `reduce_per_replica` reduces scalar logs over axis 0, which raises on several workers.
- Each replica's loss counts equally, however many samples the replica got: wrong gradients for
  an uneven last batch (5e-2 off for 150 samples in batches of 64 on two replicas).
- `while_loop` over several steps (`steps_per_execution`) cannot hold a collective.
- `train_on_batch`, `test_on_batch` and `predict_on_batch` give the whole batch to every replica:
  metrics that count, and predictions, come R times.
- The first batch is taken for its shapes, which a generator does not give again.
- `predict` on a dataset read from files puts the outputs in the order of the files' shards.
- Splitting a batch of a generator or PyDataset lets a step write into the user's arrays
  (`RebatchDatasetV2` of TensorFlow 2.21).
- Data whose number of batches Keras does not know costs a step without data in each epoch, which
  counts in `optimizer.iterations` and decays weights. On a single device, too.

Overrides sit on the one model (and its optimizer, losses and variables) that was adapted, but for
those of `_repaired_keras`, which last as long as a step of such a model is traced or run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager as ContextManager
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from keras_distplug.compat import collectives, empty_batches, losses, optimizers, replica_state
from keras_distplug.compat.data import batch_size, smallest_batch
from keras_distplug.compat.model import drop_functions, layers_of, optimizers_of
from keras_distplug.compat.override import is_marked, mark, override
from keras_distplug.compat.share import current, samples_of, share_of
from keras_distplug.core.errors import ModelError

_WARNED = "_distplug_warned_of_uneven_batches"
_TAKES_EMPTY = "_distplug_takes_empty_batches"
_STOCK_BUILD = "_distplug_stock_maybe_symbolic_build"


def adapt(model: keras.Model) -> keras.Model:
    """Makes `fit`, `evaluate`, `predict` and the `*_on_batch` methods right under a strategy.

    `distributed_fit` and the callbacks of `defaults()` do this by themselves; call it for a model
    that is evaluated without being fitted. It acts on this model only, stays, and may be called
    again.

    What several replicas compute is what one process computes from the same global batches. That
    takes some care of you where you write the step yourself:

    - A `train_step` takes its loss from `self.compute_loss` or a `keras.losses.Loss` object;
      another one it divides by the number of replicas, because gradients are summed.
    - `add_loss` in a layer is taken as a mean over the samples of a batch.
    - State that a layer assigns in `call` is averaged over the samples if it is floating, and has
      to be the same on all replicas if it is not. State that a metric of your own assigns is added
      up, as Keras has it.
    - A metric that a `train_step` updates with a loss, as it was computed, becomes the mean over
      batches of the loss. One that it updates with something made of losses sees the replica's part
      of them, which is R times smaller.

    The logs that callbacks get behind each batch are means over the replicas' own; those of epochs,
    of `evaluate` and of `*_on_batch` are of all samples.

    Example:

    ```python
    with strategy.scope():
        model = keras.models.load_model("model.keras")
    kd.adapt(model).evaluate(ds)
    ```

    Args:
        model: A Keras model made inside `strategy.scope()`. On a single device, the only change is
            that data of unknown length costs no step without data.

    Returns:
        The same model.

    Raises:
        ModelError: From here or from the first `fit`, `evaluate` or `*_on_batch`, for what cannot
            be made right on several replicas: a stateful RNN, `jit_compile=True`, a loss with
            `reduction=None`, one that compares the samples of a batch with each other.
    """
    if not mark(model):
        return model
    if not _has_several_replicas(model.distribute_strategy):
        override(model, "train_step", _only_with_data(model))
    else:
        collectives.separate(model.distribute_strategy)
        logged = _Logged()
        override(model, "_maybe_symbolic_build", _symbolic_build(model))
        override(model, "_make_function", _make_function(model, logged))
        override(model, "_aggregate_additional_loss", _additional_loss(model))
        override(model, "compute_loss", losses.noting(model.compute_loss))
        override(model, "_get_metrics_result_or_logs", _logs_of_all_replicas(model, logged))
        override(model, "predict", _ordered_predict(model))
        override(model, "predict_on_batch", _split_predict_on_batch(model))
        _adapt_parts(model)
    drop_functions(model)
    return model


def is_adapted(model: keras.Model) -> bool:
    return is_marked(model)


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    return bool(keras_trainer._collective_all_reduce_multi_worker(strategy))


def _has_several_replicas(strategy: tf.distribute.Strategy) -> bool:
    return strategy.num_replicas_in_sync > 1 or is_multi_worker(strategy)


def install_dispatch() -> None:
    """Lets a plain `model.fit` under MultiWorkerMirroredStrategy adapt its model by itself.

    Keras fails before it looks at the callbacks, so the first method that `fit` and `evaluate` call
    on the class gets a guard. It acts only on models under that strategy. `remove_dispatch` puts
    Keras' own method back.
    """
    trainer = keras_trainer.TensorFlowTrainer
    if hasattr(trainer, _STOCK_BUILD):
        return
    stock = trainer._maybe_symbolic_build

    def _maybe_symbolic_build(
        self: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> None:
        if is_multi_worker(self.distribute_strategy) and not is_adapted(self):
            adapt(self)
            self._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)
        else:
            stock(self, iterator=iterator, data_batch=data_batch)

    setattr(trainer, _STOCK_BUILD, stock)
    trainer._maybe_symbolic_build = _maybe_symbolic_build


def remove_dispatch() -> None:
    """Undoes `install_dispatch`. Models that were adapted stay adapted."""
    trainer = keras_trainer.TensorFlowTrainer
    if hasattr(trainer, _STOCK_BUILD):
        trainer._maybe_symbolic_build = getattr(trainer, _STOCK_BUILD)
        delattr(trainer, _STOCK_BUILD)


def _adapt_parts(model: keras.Model) -> None:
    """Adapts what the model is made of. A later `compile` or `build` may have brought new parts."""
    _refuse_what_stays_wrong(model)
    for optimizer in optimizers_of(model).values():
        optimizers.see_global_gradients(optimizer)
    if getattr(model, "_compile_loss", None) is not None:
        losses.of_global_batch(model._compile_loss)
        losses.count_by_samples(model._loss_tracker)
    losses.keep_apart(model)
    for metric in model.metrics:
        if "result" not in vars(metric):
            override(metric, "result", _noted(metric))
        losses.average_over_batches(metric)
    replica_state.share_state(model)


def _refuse_what_stays_wrong(model: keras.Model) -> None:
    if getattr(model, "jit_compile", False):
        raise ModelError(
            f"The model {model.name!r} is compiled with jit_compile=True, but XLA cannot compile a "
            "step that several replicas take together. Leave jit_compile out: Keras does not use "
            "XLA under a strategy by itself."
        )
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ModelError(
                f"Layer {layer.name!r} ({type(layer).__name__}) of model {model.name!r} is "
                "stateful: it keeps a state for each sample from one batch to the next, but which "
                "replica has which sample changes with the batch. Use stateful=False, or train on "
                "one device."
            )


def _only_with_data(model: keras.Model) -> Callable[[Any], Any]:
    stock = model.train_step

    def train_step(data: Any) -> Any:
        # XLA compiles the step into one operation, which waits for the data; and variables that are
        # made in it must not.
        if model.jit_compile:
            return stock(data)
        with _after(data):
            return stock(data)

    return train_step


def _after(data: Any) -> ContextManager[None]:
    """Lets nothing happen without `data`.

    TensorFlow inlines a step into the function that asks for data, and there runs what does not
    depend on them although there are none.
    """
    tensors = [value for value in keras.tree.flatten(data) if isinstance(value, tf.Tensor)]
    waiting: ContextManager[None] = tf.control_dependencies([tf.identity(t) for t in tensors])
    return waiting


def _symbolic_build(model: keras.Model) -> Callable[..., None]:
    strategy = model.distribute_strategy

    def _maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        _adapt_parts(model)
        _note_empty_parts(model, iterator, data_batch)
        if iterator is not None:
            _warn_of_uneven_batches(model, iterator)
            data_batch = _spec_of_first(iterator) or _first_batch(iterator, strategy)
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)
        _adapt_parts(model)

    return _maybe_symbolic_build


def _note_empty_parts(model: keras.Model, iterator: Any, data_batch: Any) -> None:
    """Notes whether any data so far may leave a replica without samples."""
    if iterator is not None:
        smallest = smallest_batch(iterator.data_adapter)
    else:
        smallest = len(next(v for v in keras.tree.flatten(data_batch) if v is not None))
    few = smallest is None or smallest < model.distribute_strategy.num_replicas_in_sync
    override(model, _TAKES_EMPTY, few or vars(model).get(_TAKES_EMPTY, False))


def _warn_of_uneven_batches(model: keras.Model, iterator: Any) -> None:
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    adapter = iterator.data_adapter
    dataset = getattr(adapter, "_dataset", None)
    batch = adapter.batch_size
    if batch is None and isinstance(dataset, tf.data.Dataset):
        batch = batch_size(dataset)
    first_worker = not getattr(strategy.cluster_resolver, "task_id", 0)
    if batch is None or batch % replicas == 0 or not first_worker or vars(model).get(_WARNED):
        return
    override(model, _WARNED, True)
    fewer, more = batch // replicas, batch // replicas + 1
    evenly = " or ".join(str(each * replicas) for each in (fewer, more) if each)
    warnings.warn(
        f"The global batch of {batch} samples does not divide by the {replicas} replicas of "
        f"{type(strategy).__name__}. The results are right, but in each step all replicas wait for "
        f"those with most samples. A batch of {evenly} is split evenly; "
        "`keras_distplug.global_batch(per_replica)` computes it.",
        stacklevel=2,
    )


def _spec_of_first(iterator: Any) -> Any:
    """Shapes and types of a replica's batch. None where they are not known without looking.

    Looking costs a batch of a generator, and the order that a shuffled dataset has first.
    """

    def first(spec: Any) -> Any:
        spec = getattr(spec, "_value_specs", (spec,))[0]
        return None if isinstance(spec, tf.OptionalSpec) else spec

    batch = keras.tree.map_structure(first, iterator._distributed_dataset.element_spec)
    known = (
        spec is None or (spec.shape.rank is not None and None not in spec.shape[1:])
        for spec in keras.tree.flatten(batch)
    )
    return batch if all(known) else None


def _first_batch(iterator: Any, strategy: tf.distribute.Strategy) -> Any:
    for item in iterator:  # (step, iterator) in Keras 3.10, (begin, end, iterator) since
        return keras.tree.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], next(item[-1])
        )
    return None


def _make_function(model: keras.Model, logged: _Logged) -> Callable[..., Any]:
    strategy = model.distribute_strategy

    def _make_function(step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(data: Any, total: Any) -> Any:
            data = keras.tree.map_structure(_of_any_batch_size, data)
            with _after(data), share_of(data, total) as share:
                logs = step_function(data)
                logged.note(logs, share.results)
                logs = keras.tree.map_structure(losses.of_all_replicas, logs)
                replica_state.bring_together(share)
            return logs if total is not None else _mean_over_workers(logs)

        @functools.cache
        def steps(takes_empty: bool) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
            """A function of a batch, and one of an iterator. Whether replicas may get no samples is
            not seen in a trace, and costs a small network a few percent of its time."""

            @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
            def one_step_on_data(data: Any) -> Any:
                total = None if is_multi_worker(strategy) else _samples_on_all(data, strategy)
                with _repaired_keras(model, takes_empty):
                    logs = strategy.run(step, args=(data, total))
                return keras.tree.map_structure(
                    lambda value: _mean(strategy.experimental_local_results(value)), logs
                )

            @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
            def next_step(iterator: Any) -> Any:
                batch = iterator.get_next()
                # Given back so that it is in use until the step ends. TensorFlow 2.21 else computes
                # in its memory, which is that of the user's arrays where a generator gives them.
                return one_step_on_data(batch), batch

            if not model.run_eagerly:
                one_step_on_data = tf.function(one_step_on_data, reduce_retracing=True)
            if hasattr(model, "_autoconvert_optionals"):  # Keras 3.11 and newer
                one_step_on_data = model._autoconvert_optionals(one_step_on_data)
            if is_multi_worker(strategy):
                # An error in a function that workers run together leaves no collective working.
                next_step = _asking_first(one_step_on_data)
            elif not model.run_eagerly:
                next_step = tf.function(next_step, reduce_retracing=True)
            return one_step_on_data, next_step

        def function(iterator: Any) -> Any:
            # Workers have to trace the same.
            takes_empty = is_multi_worker(strategy) or vars(model).get(_TAKES_EMPTY, True)
            one_step_on_data, next_step = steps(takes_empty)
            if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
                logs = one_step_on_data(_split(next(iterator), strategy))
                logs = model._get_metrics_result_or_logs(logs)
                return keras.tree.map_structure(tf.convert_to_tensor, logs)
            outputs = None
            for _ in range(model.steps_per_execution):
                try:
                    outputs, _ = next_step(iterator)
                except tf.errors.OutOfRangeError:
                    if outputs is None:
                        raise
                    break
            return outputs

        return function

    return _make_function


@contextmanager
def _repaired_keras(model: keras.Model, takes_empty: bool) -> Iterator[None]:
    """What is mended outside of the model, for as long as a step runs or is traced."""
    strategy = model.distribute_strategy
    empty = empty_batches.computed_right(strategy) if takes_empty else nullcontext()
    with losses.sums_over_samples(model), losses.noted(), empty:
        yield


def _asking_first(one_step_on_data: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def next_step(iterator: Any) -> Any:
        batch = iterator.get_next_as_optional()
        if not batch.has_value():
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        value = batch.get_value()
        return one_step_on_data(value), value

    return next_step


def _of_any_batch_size(value: Any) -> Any:
    """Hides the number of samples from the trace, as a dataset's iterator does inside a function.

    Keras weights the losses of single outputs by it where it is known, and by 1 where it is not.
    """
    if tf.executing_eagerly() or not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])


def _split(batch: Any, strategy: tf.distribute.Strategy) -> Any:
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


def _samples_on_all(data: Any, strategy: tf.distribute.Strategy) -> tf.Tensor:
    """Samples in a global batch that is all in this process, without a collective."""
    locals_of = strategy.experimental_local_results
    flat = [value for value in keras.tree.flatten(data) if value is not None]
    return tf.add_n([samples_of(part) for part in locals_of(flat[0])])


def _mean(values: Sequence[Any]) -> Any:
    """The mean of the local replicas' logs; the first of what has none."""
    first = values[0]
    if len(values) == 1 or not tf.is_tensor(first) or not first.dtype.is_floating:
        return first
    return tf.add_n(values) / tf.cast(len(values), first.dtype) if not first.shape.rank else first


def _mean_over_workers(outputs: Any) -> Any:
    """Averages the scalars among a step's logs over all replicas, in one collective."""
    flat = keras.tree.flatten(outputs)
    scalars = [
        i
        for i, value in enumerate(flat)
        if tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating
    ]
    if scalars:
        context = tf.distribute.get_replica_context()
        mean = context.all_reduce(
            tf.distribute.ReduceOp.MEAN, tf.stack([tf.cast(flat[i], tf.float32) for i in scalars])
        )
        for i, value in zip(scalars, tf.unstack(mean), strict=True):
            flat[i] = tf.cast(value, flat[i].dtype)
    return keras.tree.pack_sequence_as(outputs, flat)


class _Logged:
    """Names under which steps have logged the result of a metric, and those of anything else."""

    def __init__(self) -> None:
        self.results: set[str] = set()
        self.others: set[str] = set()

    def note(self, logs: Any, results: Any) -> None:
        for name, value in logs.items() if isinstance(logs, dict) else ():
            if isinstance(value, dict):
                self.note(value, results)
            else:
                (self.results if any(value is r for r in results) else self.others).add(name)

    def is_result(self, name: str) -> bool:
        return name in self.results and name not in self.others


def _noted(metric: keras.metrics.Metric) -> Callable[[], Any]:
    stock = metric.result

    def result() -> Any:
        value = stock()
        if (share := current()) is not None:
            share.results += keras.tree.flatten(value)
        return value

    return result


def _additional_loss(model: keras.Model) -> Callable[[Any], Any]:
    stock = model._aggregate_additional_loss
    return lambda loss: losses.of_samples(stock(loss))


def _logs_of_all_replicas(model: keras.Model, logged: _Logged) -> Callable[[Any], Any]:
    """Takes the results of metrics that a step has logged from the metrics, over all replicas.

    Keras does so where the step has logged all of them, and nothing else.
    """
    stock = model._get_metrics_result_or_logs

    def of_all(logs: Any) -> Any:
        results = model.get_metrics_result()

        def replaced(logs: Any) -> Any:
            if not isinstance(logs, dict):
                return logs
            return {
                name: _like(value, results.get(name, value))
                if logged.is_result(name)
                else replaced(value)
                for name, value in logs.items()
            }

        return replaced(stock(logs))

    return of_all


def _like(value: Any, result: Any) -> Any:
    """Keras 3.10 gives results as Python's numbers, and what steps log as tensors."""
    return tf.convert_to_tensor(result, value.dtype) if tf.is_tensor(value) else result


def _ordered_predict(model: keras.Model) -> Callable[..., Any]:
    stock = model.predict

    def predict(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, tf.data.Dataset):
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = (
                tf.data.experimental.AutoShardPolicy.DATA
            )
            x = x.with_options(options)
        with empty_batches.computed_right(model.distribute_strategy):
            return stock(x, *args, **kwargs)

    return predict


def _split_predict_on_batch(model: keras.Model) -> Callable[..., Any]:
    def predict_on_batch(x: Any) -> Any:
        model.make_predict_function()
        with empty_batches.computed_right(model.distribute_strategy):
            outputs = model.predict_function([(_split(x, model.distribute_strategy),)])
        return keras.tree.map_structure(keras_trainer.convert_to_np_if_not_ragged, outputs)

    return predict_on_batch
