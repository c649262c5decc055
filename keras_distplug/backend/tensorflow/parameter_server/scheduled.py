"""`fit` under ParameterServerStrategy: the chief schedules steps, and workers run them.

Upstream bugs (Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21; no known issue for either):

- `fit`, `evaluate` and `predict` read the data on the chief, which TensorFlow refuses ("you need to
  pass this dataset to ClusterCoordinator.create_per_worker_dataset"), and run every step there.
- Keras' variables `assign` a value derived from one that they have read: if two workers do so at
  the same time, one update is lost. `shared_state.py` fixes this.
- The queue of TensorFlow's coordinator accepts 262,144 steps, so that the chief would have
  scheduled a whole epoch before a worker has started it.

Here, `fit` schedules a model's batches on workers, which read their own data; the chief waits for
all scheduled steps before it reads metrics or weights. `evaluate`, `predict` and the `*_on_batch`
methods run on the chief only; the variables remain on their servers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.input.readers import LateDistributedDataset, pass_strategy
from keras_distplug.backend.tensorflow.parameter_server import embeddings, shared_state
from keras_distplug.backend.tensorflow.replicas import gates, optimizers, touched
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached
from keras_distplug.backend.tensorflow.runtime.models import (
    all_variables,
    get_inner_optimizer,
    list_layers,
    list_optimizers,
)
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.backend.tensorflow.runtime.workers import (
    get_resolver,
    is_scheduled,
    make_chief_strategy,
)
from keras_distplug.core.errors import DataError, ModelError

_UPSTREAM = Upstream(keras="3.10 to 3.15", tensorflow="2.18 to 2.21")

_POLL_S = 0.5
_ON_CHIEF = ("evaluate", "predict", "test_on_batch", "predict_on_batch")


def adapt(model: keras.Model) -> None:
    """Makes the methods of a model work under ParameterServerStrategy. Call it once per model."""
    _refuse_unsupported(model)
    schedule = Schedule(model)
    attach(model, schedule)
    _UPSTREAM.patch(model, "_maybe_symbolic_build", schedule.build)
    _UPSTREAM.patch(model, "make_train_function", schedule.make_train_function)
    _UPSTREAM.patch(model, "_get_metrics_result_or_logs", _logs(model, schedule))
    for name in _ON_CHIEF:
        _UPSTREAM.patch(model, name, _on_chief(model, schedule, getattr(model, name)))


def get_schedule(model: keras.Model) -> Schedule:
    """Returns the schedule of an adapted model."""
    schedule = attached(model, Schedule)
    assert schedule is not None, "the model is not adapted"
    return schedule


def settle(model: keras.Model) -> None:
    """Waits until all scheduled steps are finished. Has no effect under other strategies.

    Raises:
        Exception: The error of a step that failed.
    """
    schedule = attached(model, Schedule)
    if schedule is not None:
        schedule.settle()


class Schedule:
    """The steps of one model.

    Args:
        model: A model under ParameterServerStrategy.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._strategy = model.distribute_strategy
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        self._workers = len(get_resolver(self._strategy).cluster_spec().as_dict()["worker"])
        self._data: LateDistributedDataset | None = None
        self._skipped: shared_state.SkippedSteps | None = None
        self._skips_non_finite = False  # for the next `fit`
        with self._strategy.scope():
            # The number of times that every worker has started reading, including restarts.
            self._starts = touched.exclude_variable(
                tf.Variable(tf.zeros([self._workers], tf.int64), trainable=False)
            )

    # Called by Keras

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None:
            data = getattr(iterator, "_distributed_dataset", None)
            is_for_chief = vars(self._model)["_distribute_strategy"] is None  # in `evaluate`
            if is_for_chief:
                pass_strategy(iterator, make_chief_strategy())
                spec = iterator.data_adapter.get_tf_dataset().element_spec
            elif isinstance(data, LateDistributedDataset):
                data.use(self._strategy)
                self._data = data
                data.is_endless = iterator.steps_per_epoch is not None
                if iterator.steps_per_epoch is None and iterator.data_adapter.num_batches is None:
                    raise DataError(
                        "Expected a known number of batches per epoch. Received: data that is "
                        "infinite or of unknown length. Pass `steps_per_epoch`."
                    )
                spec = data.element_spec
            else:
                raise DataError(
                    "Expected data that workers read themselves, as ParameterServerStrategy "
                    "requires. Received: data that a plain `fit` reads in this process "
                    f"({type(iterator.data_adapter).__name__}). Use "
                    "`keras_distplug.distributed_fit(model, x)`, or pass "
                    "`keras_distplug.resumable(x)` to `fit`."
                )
            data_batch = tf.nest.map_structure(_spec_of_any_size, spec)
        else:  # `train_on_batch` and the like, which have no data for the workers
            self._data = None
        with self._strategy.scope():
            self._model._symbolic_build(data_batch=data_batch)
        _refuse_unsupported(self._model)
        shared_state.share(self._model)
        embeddings.adapt(self._model)

    def make_train_function(self, force: bool = False) -> Any:
        """Called by Keras at the start of every `fit`, after the callbacks' `set_model`."""
        data, model = self._data, self._model
        if data is None:
            raise DataError(
                "Expected `fit`, whose data the workers read themselves. Received: a call of "
                "`train_on_batch`, which is not supported under ParameterServerStrategy. Pass the "
                "data to `distributed_fit`, or `resumable(x)` to `fit`."
            )
        skipped = self._skipped if self._skips_non_finite else None
        self._skips_non_finite = False
        for optimizer in list_optimizers(model).values():
            gates.set_gate(optimizer, skipped)
        step = self._make_step(model.steps_per_execution, skipped)
        iterators: list[Any] = []
        traces: list[Any] = []

        def function(_: Any) -> dict[str, Any]:
            if not iterators:
                # Not earlier, because the model's initial state is only known here.
                iterators.append(self._read_on_workers(data))
            [iterator] = iterators
            self._wait_for_workers()
            if traces:
                # The coordinator's `schedule` looks up the trace every time, within the strategy's
                # scope, which takes half a millisecond on the chief.
                self._coordinator._cluster.schedule(traces[0], (iterator,), {})
            else:
                self._coordinator.schedule(step, args=(iterator,))
                with self._strategy.scope():
                    spec = iterator._values[0]._type_spec
                    traces.append(step.get_concrete_function(spec))
            return {}

        model.train_function = function
        return function

    def settle(self) -> None:
        self._coordinator.join()

    # Steps

    def _make_step(self, steps: int, skipped: shared_state.SkippedSteps | None) -> Any:
        model, strategy = self._model, self._strategy

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def build_for_worker(batch: Any, numbers: tuple[tf.Tensor, tf.Tensor]) -> None:
            # TensorFlow prunes this from a step that draws no random numbers.
            seed = tf.random.experimental.stateless_fold_in(*numbers)
            number = tf.random.stateless_uniform([], seed, 0, 2**62, tf.int64)
            with shared_state.step(model, number, skipped):
                model.train_step(batch)

        @tf.function  # type: ignore[untyped-decorator]
        def step(iterator: Any) -> None:
            if steps == 1:
                strategy.run(build_for_worker, args=next(iterator))
            else:
                for _ in tf.range(steps):
                    strategy.run(build_for_worker, args=next(iterator))

        return step

    def _wait_for_workers(self) -> None:
        """Waits while as many steps as there are workers, or more, are queued.

        A smaller queue would have the same effect, but then a step whose worker was lost could not
        be put back into it.
        """
        queue = self._coordinator._cluster.closure_queue
        with queue._queue_lock:
            while queue._queue.qsize() >= self._workers and queue._error is None:
                queue._queue_free_slot_condition.wait(_POLL_S)

    def _read_on_workers(self, data: LateDistributedDataset) -> Any:
        optimizer, workers, starts = self._model.optimizer, self._workers, self._starts
        # The seed depends on the updates so far, so that a resumed run reads in another order.
        trained = 0 if optimizer is None else int(optimizer.iterations.numpy())
        shared_state.initialize_averages(self._model)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def build_for_worker() -> tf.data.Dataset:
            worker = tf.cast(
                tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64
            )
            one = tf.IndexedSlices(tf.ones([1], tf.int64), tf.reshape(worker, [1]))
            times = tf.gather(starts.scatter_add(one), worker)
            seed = tf.stack([tf.constant(trained, tf.int64), worker])
            seed = tf.random.experimental.stateless_fold_in(seed, times)
            batches = data.build_for_worker(worker, workers, seed).repeat()
            numbers = tf.data.Dataset.zip(
                tf.data.Dataset.from_tensors(seed).repeat(), tf.data.Dataset.counter()
            )
            return tf.data.Dataset.zip(batches, numbers)

        return iter(self._coordinator.create_per_worker_dataset(build_for_worker))

    # Skipped steps

    def skip_non_finite(self) -> None:
        """Makes steps with non-finite gradients or loss change nothing except their count."""
        if self._skipped is None:
            with self._strategy.scope():
                self._skipped = shared_state.SkippedSteps()
        self._skips_non_finite = True
        self._skipped.reset()
        for optimizer in list_optimizers(self._model).values():
            optimizers.add_gate(optimizer)
        shared_state.record_losses(self._model)

    def reset_skipped(self) -> None:
        if self._skipped is not None:
            self._skipped.reset()

    def count_skipped(self) -> tuple[int, int]:
        """Returns the number of skipped steps in this `fit`, and the current consecutive number."""
        return (0, 0) if self._skipped is None else self._skipped.counts()


def _spec_of_any_size(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _logs(model: keras.Model, schedule: Schedule) -> Callable[[Any], Any]:
    stock = model._get_metrics_result_or_logs

    def _get_metrics_result_or_logs(logs: Any) -> Any:
        schedule.settle()
        return stock(logs) if logs else model.get_metrics_result()

    return _get_metrics_result_or_logs


def _on_chief(
    model: keras.Model, schedule: Schedule, stock: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(stock)
    def on_chief(*args: Any, **kwargs: Any) -> Any:
        schedule.settle()
        with _without_strategy(model):
            return stock(*args, **kwargs)

    return on_chief


@contextmanager
def _without_strategy(model: keras.Model) -> Iterator[None]:
    """Lets Keras read data and run steps as in a single process."""
    strategy = model._distribute_strategy
    _UPSTREAM.patch(model, "_distribute_strategy", None)
    try:
        validation = getattr(model, "_eval_epoch_iterator", None)
        if validation is not None and is_scheduled(validation._distribute_strategy):
            # `fit` has created it for the workers.
            validation._distribute_strategy = model.distribute_strategy
            validation._distributed_dataset = validation.data_adapter.get_tf_dataset()
        yield
    finally:
        _UPSTREAM.patch(model, "_distribute_strategy", strategy)


def _refuse_unsupported(model: keras.Model) -> None:
    """Raises an error for features that are wrong if steps overlap, or that workers cannot run."""

    def refuse(what: str, why: str, remedy: str) -> None:
        raise ModelError(
            f"The model {model.name!r} {what}, but under ParameterServerStrategy, {why}. {remedy}"
        )

    if model.run_eagerly:
        refuse("has run_eagerly=True", "workers can only run TensorFlow functions", "Remove it.")
    if getattr(model, "jit_compile", False):
        refuse("has jit_compile=True", "the variables of a step are remote", "Remove jit_compile.")
    for optimizer in list_optimizers(model).values():
        inner = get_inner_optimizer(optimizer)
        if inner is not optimizer:
            refuse(
                "has a LossScaleOptimizer",
                "its scale would depend on which worker was last",
                "Use mixed_bfloat16, or float32.",
            )
        if inner.gradient_accumulation_steps:
            refuse(
                "accumulates gradients",
                "workers would add to, apply and clear the same sums concurrently",
                "Remove gradient_accumulation_steps, and use larger batches.",
            )
        if inner.use_ema and inner.ema_overwrite_frequency:
            refuse(
                "overwrites weights with their averages",
                "concurrent updates of the weights would be lost",
                "Remove ema_overwrite_frequency: the weights get the averages when `fit` ends.",
            )
    for layer in list_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            refuse(
                f"has the stateful layer {layer.name!r}",
                "a worker does not get consecutive batches",
                "Use stateful=False.",
            )
    for variable in all_variables(model):
        if getattr(variable, "constraint", None) is not None:
            refuse(
                f"has a constraint on {variable.path}",
                "updates by other workers while one applies the constraint would be lost",
                "Use a regularizer, or remove the constraint.",
            )
    embeddings.refuse_unsupported(model, refuse)
