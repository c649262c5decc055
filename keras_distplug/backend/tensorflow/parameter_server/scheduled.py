"""`fit` under ParameterServerStrategy: the chief schedules steps, and workers take them.

What is wrong upstream (Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21; no issue of either is known):

- `fit`, `evaluate` and `predict` read the data on the chief, which TensorFlow refuses ("you need to
  pass this dataset to ClusterCoordinator.create_per_worker_dataset"), and run each step there.
- Keras' variables `assign` what they have read: of two workers that do it at once, one is lost.
  `shared_state.py` mends that.
- The queue of TensorFlow's coordinator takes 262,144 steps at once, so that whoever counts them
  would be through with an epoch before a worker has begun it.

What a model's `fit` does here: its batches are scheduled on workers, which read data of their own;
the chief waits for all of them before it looks at metrics or weights. `evaluate`, `predict` and the
`*_on_batch` methods run on the chief alone, with the variables where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.input.readers import LateDistributedDataset, tell_strategy
from keras_distplug.backend.tensorflow.parameter_server import embeddings, shared_state
from keras_distplug.backend.tensorflow.replicas import gates, optimizers, touched
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached
from keras_distplug.backend.tensorflow.runtime.models import (
    all_variables,
    inner_of,
    layers_of,
    optimizers_of,
)
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled, of_chief, resolver_of
from keras_distplug.core.errors import DataError, ModelError

_UPSTREAM = Upstream(keras="3.10 to 3.15", tensorflow="2.18 to 2.21")

_LOOK_S = 0.5
_ON_CHIEF = ("evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def adapt(model: keras.Model) -> None:
    """Makes the methods of a model under ParameterServerStrategy work; once for each model."""
    _refuse_what_stays_wrong(model)
    schedule = Schedule(model)
    attach(model, schedule)
    _UPSTREAM.patch(model, "_maybe_symbolic_build", schedule.build)
    _UPSTREAM.patch(model, "make_train_function", schedule.make_train_function)
    _UPSTREAM.patch(model, "_get_metrics_result_or_logs", _logs(model, schedule))
    for name in _ON_CHIEF:
        _UPSTREAM.patch(model, name, _on_chief(model, schedule, getattr(model, name)))


def schedule_of(model: keras.Model) -> Schedule:
    """That of a model that is adapted."""
    schedule = attached(model, Schedule)
    assert schedule is not None, "the model is not adapted"
    return schedule


def settle(model: keras.Model) -> None:
    """Waits until all steps that were scheduled are done. Without effect under other strategies.

    Raises:
        Exception: What one of them has failed with.
    """
    schedule = attached(model, Schedule)
    if schedule is not None:
        schedule.settle()


class Schedule:
    """The steps of one model.

    Args:
        model: Under ParameterServerStrategy.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._strategy = model.distribute_strategy
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        self._workers = len(resolver_of(self._strategy).cluster_spec().as_dict()["worker"])
        self._data: LateDistributedDataset | None = None
        self._left_out: shared_state.LeftOut | None = None
        self._leaves_out = False  # of the next `fit`
        with self._strategy.scope():
            # Once for each time that a worker has begun to read, it being started again among them.
            self._begun = touched.leave_out(
                tf.Variable(tf.zeros([self._workers], tf.int64), trainable=False)
            )

    # What Keras calls

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None:
            data = getattr(iterator, "_distributed_dataset", None)
            is_for_chief = vars(self._model)["_distribute_strategy"] is None  # in `evaluate`
            if is_for_chief:
                tell_strategy(iterator, of_chief())
                spec = iterator.data_adapter.get_tf_dataset().element_spec
            elif isinstance(data, LateDistributedDataset):
                data.use(self._strategy)
                self._data = data
                data.is_endless = iterator.steps_per_epoch is not None
                if iterator.steps_per_epoch is None and iterator.data_adapter.num_batches is None:
                    raise DataError(
                        "How many batches an epoch has is not known: the data have no end, or do "
                        "not say where it is. Give `steps_per_epoch`."
                    )
                spec = data.element_spec
            else:
                raise DataError(
                    "Under ParameterServerStrategy workers read the data by themselves. Received: "
                    f"{type(iterator.data_adapter).__name__} of a plain `fit`. Use "
                    "`keras_distplug.distributed_fit(model, x)`, or give `fit` "
                    "`keras_distplug.resumable(x)`."
                )
            data_batch = tf.nest.map_structure(_spec_of_any_size, spec)
        with self._strategy.scope():
            self._model._symbolic_build(data_batch=data_batch)
        _refuse_what_stays_wrong(self._model)
        shared_state.share(self._model)
        embeddings.adapt(self._model)

    def make_train_function(self, force: bool = False) -> Any:
        """Keras calls it at the begin of each `fit`, behind the callbacks' `set_model`."""
        data, model = self._data, self._model
        if data is None:
            raise DataError("There are no data to train on: `fit` has given none.")
        left_out = self._left_out if self._leaves_out else None
        self._leaves_out = False
        for optimizer in optimizers_of(model).values():
            gates.put_before(optimizer, left_out)
        step = self._make_step(model.steps_per_execution, left_out)
        iterators: list[Any] = []
        traces: list[Any] = []

        def function(_: Any) -> dict[str, Any]:
            if not iterators:
                # Here, because what the model goes on from is known by now.
                iterators.append(self._read_on_workers(data))
            [iterator] = iterators
            self._wait_for_workers()
            if traces:
                # The coordinator's own `schedule` looks the trace up each time, and enters the
                # strategy's scope for it: half a millisecond of the chief's time.
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

    def _make_step(self, steps: int, left_out: shared_state.LeftOut | None) -> Any:
        model, strategy = self._model, self._strategy

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def of_worker(batch: Any, numbers: tuple[tf.Tensor, tf.Tensor]) -> None:
            # TensorFlow takes it out of a step that draws no random numbers.
            seed = tf.random.experimental.stateless_fold_in(*numbers)
            number = tf.random.stateless_uniform([], seed, 0, 2**62, tf.int64)
            with shared_state.step(model, number, left_out):
                model.train_step(batch)

        @tf.function  # type: ignore[untyped-decorator]
        def step(iterator: Any) -> None:
            if steps == 1:
                strategy.run(of_worker, args=next(iterator))
            else:
                for _ in tf.range(steps):
                    strategy.run(of_worker, args=next(iterator))

        return step

    def _wait_for_workers(self) -> None:
        """Until no more steps wait for a worker than there are workers.

        A smaller queue would do that by itself, but then nobody could put a step back into it whose
        worker was lost.
        """
        queue = self._coordinator._cluster.closure_queue
        with queue._queue_lock:
            while queue._queue.qsize() >= self._workers and queue._error is None:
                queue._queue_free_slot_condition.wait(_LOOK_S)

    def _read_on_workers(self, data: LateDistributedDataset) -> Any:
        optimizer, workers, begun = self._model.optimizer, self._workers, self._begun
        # What is trained already makes the order another one than before.
        trained = 0 if optimizer is None else int(optimizer.iterations.numpy())
        shared_state.begin_averages(self._model)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def of_worker() -> tf.data.Dataset:
            worker = tf.cast(
                tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64
            )
            one = tf.IndexedSlices(tf.ones([1], tf.int64), tf.reshape(worker, [1]))
            times = tf.gather(begun.scatter_add(one), worker)
            seed = tf.stack([tf.constant(trained, tf.int64), worker])
            seed = tf.random.experimental.stateless_fold_in(seed, times)
            batches = data.of_worker(worker, workers, seed).repeat()
            numbers = tf.data.Dataset.zip(
                tf.data.Dataset.from_tensors(seed).repeat(), tf.data.Dataset.counter()
            )
            return tf.data.Dataset.zip(batches, numbers)

        return iter(self._coordinator.create_per_worker_dataset(of_worker))

    # What is left out

    def leave_out_non_finite(self) -> None:
        """Has steps whose gradients or loss are not finite change nothing but the count of them."""
        if self._left_out is None:
            with self._strategy.scope():
                self._left_out = shared_state.LeftOut()
        self._leaves_out = True
        self._left_out.reset()
        for optimizer in optimizers_of(self._model).values():
            optimizers.give_gate(optimizer)
        shared_state.note_losses(self._model)

    def forget_left_out(self) -> None:
        if self._left_out is not None:
            self._left_out.reset()

    def left_out(self) -> tuple[int, int]:
        """Returns how many steps this `fit` has skipped, and how many of the last ones."""
        return (0, 0) if self._left_out is None else self._left_out.counts()


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
    """Lets Keras read data, and take steps, as in a single process."""
    strategy = model._distribute_strategy
    _UPSTREAM.patch(model, "_distribute_strategy", None)
    try:
        validation = getattr(model, "_eval_epoch_iterator", None)
        if validation is not None and is_scheduled(validation._distribute_strategy):
            # `fit` has made it for the workers.
            validation._distribute_strategy = model.distribute_strategy
            validation._distributed_dataset = validation.data_adapter.get_tf_dataset()
        yield
    finally:
        _UPSTREAM.patch(model, "_distribute_strategy", strategy)


def _refuse_what_stays_wrong(model: keras.Model) -> None:
    """What is not right where steps overlap, or cannot be run elsewhere."""

    def refuse(what: str, why: str, remedy: str) -> None:
        raise ModelError(
            f"The model {model.name!r} {what}, but under ParameterServerStrategy {why}. {remedy}"
        )

    if model.run_eagerly:
        refuse("has run_eagerly=True", "workers run functions of TensorFlow only", "Leave it out.")
    if getattr(model, "jit_compile", False):
        refuse("has jit_compile=True", "a step has variables elsewhere", "Leave jit_compile out.")
    for optimizer in optimizers_of(model).values():
        inner = inner_of(optimizer)
        if inner is not optimizer:
            refuse(
                "has a LossScaleOptimizer",
                "its scale would follow from whichever worker was last",
                "Use mixed_bfloat16, or float32.",
            )
        if inner.gradient_accumulation_steps:
            refuse(
                "accumulates gradients",
                "workers would add to, apply and clear the same sums at once",
                "Leave gradient_accumulation_steps out, and use larger batches.",
            )
        if inner.use_ema and inner.ema_overwrite_frequency:
            refuse(
                "overwrites weights with their averages",
                "what workers add to the weights meanwhile would be lost",
                "Leave ema_overwrite_frequency out: the weights get the averages when `fit` ends.",
            )
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            refuse(
                f"has the stateful layer {layer.name!r}",
                "no worker has the batch behind its last one",
                "Use stateful=False.",
            )
    for variable in all_variables(model):
        if getattr(variable, "constraint", None) is not None:
            refuse(
                f"has a constraint on {variable.path}",
                "what workers add to it while one applies the constraint would be lost",
                "Use a regularizer, or leave the constraint out.",
            )
    embeddings.refuse_what_stays_wrong(model, refuse)
