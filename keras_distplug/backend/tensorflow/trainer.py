"""`fit`, `evaluate` and `predict` of Keras 3 under a strategy of several replicas.

Upstream bugs fixed here (Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21; keras-team/keras#20585,
tensorflow/tensorflow#72388, ray-project/ray#47464), in addition to those listed in `losses.py`,
`optimizers.py` and `replica_state.py`:

- `TensorFlowTrainer._maybe_symbolic_build` reduces the per-replica structure of the first batch
  with `strategy.reduce`, which raises ValueError on several workers.
- `reduce_per_replica` reduces scalar logs over axis 0, which raises on several workers.
- All replicas' losses have equal weight, regardless of their numbers of samples: wrong gradients
  for an uneven last batch (5e-2 off for 150 samples in batches of 64 on two replicas).
- `while_loop` over several steps (`steps_per_execution`) cannot contain a collective.
- `train_on_batch`, `test_on_batch` and `predict_on_batch` give the whole batch to every replica:
  counting metrics are R times too large, and predictions are returned R times.
- The first batch is consumed to determine shapes, and a generator does not yield it again.
- `predict` on a dataset read from files, on several workers, returns the outputs in the order of
  the file shards.
- Splitting a batch of a generator or PyDataset lets a step write into the user's arrays
  (`RebatchDatasetV2` of TensorFlow 2.21).
- If Keras does not know the number of batches, every epoch has an additional step without data,
  which counts in `optimizer.iterations` and decays weights. This also happens on a single device.
  Keras 3.16 first checks that there is a batch.

Overrides apply only to the adapted model (and its optimizer, losses and variables), except those of
`steps.py`, which are active while a step of such a model is traced or run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from keras_distplug.backend.tensorflow.input import earlier_passes, epochs
from keras_distplug.backend.tensorflow.input.readers import (
    LateDistributedDataset,
    batch_size,
    pass_strategy,
    peeked_batch,
)
from keras_distplug.backend.tensorflow.parameter_server import scheduled
from keras_distplug.backend.tensorflow.replicas import (
    collectives,
    direct_steps,
    logs,
    losses,
    optimizers,
    replica_state,
    steps,
)
from keras_distplug.backend.tensorflow.replicas.retraces import Retraces
from keras_distplug.backend.tensorflow.replicas.touched import Touched
from keras_distplug.backend.tensorflow.runtime import private_names, progress_bars
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached, is_marked, mark
from keras_distplug.backend.tensorflow.runtime.models import (
    drop_functions,
    list_layers,
    list_optimizers,
)
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.backend.tensorflow.runtime.workers import (
    has_several_replicas,
    is_multi_worker,
    is_scheduled,
)
from keras_distplug.core.errors import ModelError

_UPSTREAM = Upstream(
    keras="3.10 to 3.15", tensorflow="2.18 to 2.21", issue="keras-team/keras#20585"
)
_CONVERTER = "_autoconvert_optionals"  # of Keras 3.11 and newer
_MAKER = "_make_function"


@dataclass(frozen=True)
class _BatchSpec:
    """The structure, shapes and dtypes of a model's batches."""

    spec: Any


def adapt(model: keras.Model) -> keras.Model:
    """Fixes `fit`, `evaluate`, `predict` and the `*_on_batch` methods under a strategy.

    `distributed_fit` and the callbacks of `defaults()` do this automatically; call it for a model
    that is evaluated without being fitted. It affects only this model, is permanent, and may be
    called repeatedly.

    Several replicas then compute the same results as one process that trains on the same global
    batches. A custom step must follow these rules:

    - A `train_step` must get its loss from `self.compute_loss` or a `keras.losses.Loss` object. It
      must divide any other loss by the number of replicas, because gradients are summed.
    - `add_loss` in a layer is treated as a mean over the samples of a batch.
    - State that a layer assigns in `call` is averaged over the samples if it is floating-point;
      otherwise it must be the same on all replicas. State that a custom metric assigns is summed,
      as in Keras.
    - A metric that a `train_step` updates with an unmodified loss is the mean of the loss over
      batches. A metric updated with a value derived from losses sees the replica's part of them,
      which is R times smaller on R replicas.

    The logs that callbacks receive after a batch are means over the replicas' logs; those of
    epochs, `evaluate` and `*_on_batch` are computed over all samples.

    Under ParameterServerStrategy, batches are scheduled on workers, which run their steps
    independently. Callbacks are called when a batch is scheduled, with empty logs. Up to one batch
    per worker may be waiting, and another one running. Epochs, checkpoints and `evaluate` wait for
    all of them. Logs of epochs are the results of metrics, which are accumulated over batches. All
    other methods of the model run on the chief only.

    Example:

    ```python
    with strategy.scope():
        model = keras.models.load_model("model.keras")
    kd.adapt(model).evaluate(ds)
    ```

    Args:
        model: A Keras model created inside `strategy.scope()`. On a single device, the only changes
            are that data of unknown length causes no step without data, and that short steps take
            less time.

    Returns:
        The same model.

    Raises:
        ModelError: Raised here or in the first `fit`, `evaluate` or `*_on_batch`, if the model
            cannot be computed correctly on several replicas: a stateful RNN, `jit_compile=True`, a
            loss with `reduction=None`, or a loss that compares the samples of a batch.
    """
    if not mark(model):
        _adapt_steps(model)
        return model
    _adapt_steps(model)
    if is_scheduled(model.distribute_strategy):
        scheduled.adapt(model)
    elif not has_several_replicas(model.distribute_strategy):
        _adapt_optimizers(model)
        if hasattr(model, _CONVERTER):
            _UPSTREAM.patch(model, _CONVERTER, Retraces.of(model).converter(model))
        if hasattr(model, _MAKER):
            _UPSTREAM.patch(model, _MAKER, direct_steps.maker(model))
    else:
        collectives.separate(model.distribute_strategy)
        logged = logs.Logged()
        _UPSTREAM.patch(model, "_maybe_symbolic_build", _make_symbolic_build(model))
        _UPSTREAM.patch(model, _MAKER, steps.maker(model, logged))
        _UPSTREAM.patch(model, "_aggregate_additional_loss", _make_additional_loss(model))
        _UPSTREAM.patch(model, "compute_loss", losses.recording(model.compute_loss))
        _UPSTREAM.patch(model, "_get_metrics_result_or_logs", logs.merged_results(model, logged))
        if is_multi_worker(model.distribute_strategy):
            _UPSTREAM.patch(model, "predict", _make_ordered_predict(model))
        _UPSTREAM.patch(model, "make_predict_function", steps.predict_maker(model))
        _UPSTREAM.patch(model, "predict_on_batch", _make_split_predict(model))
        _adapt_parts(model)
    for part in ("train", "test"):
        _UPSTREAM.patch(model, f"make_{part}_function", _function_maker(model, part))
    drop_functions(model)
    return model


def _adapt_steps(model: keras.Model) -> None:
    """Adapts the steps of `model` that are not adapted yet: the script may have replaced one."""
    strategy = model.distribute_strategy
    is_single = not (is_scheduled(strategy) or has_several_replicas(strategy))
    for name in ("train_step", "test_step"):
        step = getattr(model, name)
        if str(getattr(step, "__module__", "")).startswith("keras_distplug."):
            continue
        noted = Touched.of(model).recording(
            name, step, lambda: _has_twins(model), lambda: bool(model.run_eagerly)
        )
        _UPSTREAM.patch(model, name, noted)
        if is_single and name == "train_step":
            _UPSTREAM.patch(model, name, steps.data_dependent_train_step(model))


def _function_maker(model: keras.Model, part: str) -> Callable[..., Any]:
    """Returns a replacement for `make_train_function` or `make_test_function`. Callbacks that
    compile or freeze during `fit` call the former."""
    stock = getattr(model, f"make_{part}_function")

    def make_function(force: bool = False) -> Any:
        if force or getattr(model, f"{part}_function") is None:
            for each in ("train", "test"):  # `compile` drops both
                if each == part or getattr(model, f"{each}_function") is None:
                    Touched.of(model).forget(f"{each}_step")
                    Retraces.of(model).forget(f"{each}_step")
            if is_scheduled(model.distribute_strategy):
                pass
            elif has_several_replicas(model.distribute_strategy):
                _build_again(model)
            else:
                _adapt_optimizers(model)
        with Retraces.of(model).making(f"{part}_step"):
            return stock(force)

    return make_function


def _adapt_optimizers(model: keras.Model) -> None:
    for optimizer in list_optimizers(model).values():
        optimizers.add_gate(optimizer)


def _has_twins(model: keras.Model) -> bool:
    """True if the random ops of a step can keep their positions in variables of this process.

    XLA has its own random ops, and the positions of ParameterServerStrategy's workers would have to
    be transferred over the network.
    """
    return not model.jit_compile and not is_scheduled(model.distribute_strategy)


def install_dispatch() -> None:
    """Makes a plain `model.fit` under MultiWorkerMirroredStrategy adapt its model, passes a model's
    strategy to `resumable` data, and replaces Keras' inspection of the first batch of other data.

    Keras reads the data, and fails, before it calls any callback. Therefore the first method that
    `fit` and `evaluate` call on the class is wrapped. The wrapper affects only models under a
    strategy, and `resumable` data. `remove_dispatch` restores Keras' method.
    """
    progress_bars.install()
    trainer = private_names.Trainer
    stock = trainer._maybe_symbolic_build
    if is_marked(stock):
        return

    @functools.wraps(stock)
    def _maybe_symbolic_build(
        self: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> None:
        strategy = self.distribute_strategy
        is_ours = is_multi_worker(strategy) or is_scheduled(strategy)
        if is_ours and not is_marked(self):
            adapt(self)
            self._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)
            return
        collectives.separate(strategy)
        if iterator is not None:
            pass_strategy(iterator, self.distribute_strategy)
            if self._distribute_strategy is not None:  # otherwise, Keras inspects no batch
                iterator, data_batch = None, _inspected_batch(iterator, strategy)
                attach(self, _BatchSpec(keras.tree.map_structure(_make_spec, data_batch)))
        stock(self, iterator=iterator, data_batch=data_batch)

    mark(_maybe_symbolic_build)
    _UPSTREAM.patch(trainer, "_maybe_symbolic_build", _maybe_symbolic_build)


_before_building: list[Callable[[keras.Model], None]] = []


def call_before_building(act: Callable[[keras.Model], None]) -> None:
    """Calls `act` with every multi-worker model whose `fit` is about to create missing variables,
    such as the optimizer's, which all workers create together."""
    if act not in _before_building:
        _before_building.append(act)


def remove_dispatch() -> None:
    """Undoes `install_dispatch`. Adapted models remain adapted."""
    progress_bars.remove()
    trainer = private_names.Trainer
    if is_marked(ours := trainer._maybe_symbolic_build):
        _UPSTREAM.patch(trainer, "_maybe_symbolic_build", ours.__wrapped__)


def _adapt_parts(model: keras.Model) -> None:
    """Adapts the model's parts; a later `compile` or `build` may have added new ones."""
    _refuse_unsupported(model)
    for optimizer in list_optimizers(model).values():
        optimizers.use_global_gradients(optimizer)
    if getattr(model, "_compile_loss", None) is not None:
        losses.use_global_batch(model._compile_loss)
        losses.weight_by_samples(model._loss_tracker)
    losses.separate_added_losses(model)
    for metric in model.metrics:
        if "result" not in vars(metric):
            _UPSTREAM.patch(metric, "result", logs.recorded_result(metric))
        losses.average_over_batches(metric)
    replica_state.share_state(model)


def _refuse_unsupported(model: keras.Model) -> None:
    if getattr(model, "jit_compile", False):
        raise ModelError(
            f"The model {model.name!r} is compiled with jit_compile=True, but XLA cannot compile a "
            "step that several replicas run together. Omit jit_compile: Keras does not use XLA "
            "under a strategy by default."
        )
    for layer in list_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ModelError(
                f"Layer {layer.name!r} ({type(layer).__name__}) of model {model.name!r} is "
                "stateful: it keeps a state per sample from one batch to the next, but the "
                "assignment of samples to replicas changes with the batch. Use stateful=False, or "
                "train on one device."
            )


def _make_symbolic_build(model: keras.Model) -> Callable[..., None]:
    strategy = model.distribute_strategy

    def _maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        _adapt_parts(model)
        if iterator is not None:
            pass_strategy(iterator, strategy)
            if is_multi_worker(strategy) and epochs.is_of_fit(iterator):
                for act in _before_building:
                    act(model)
            _warn_of_uneven_batches(model, iterator)
            data_batch = _first_spec(iterator)
            if data_batch is None:
                data_batch = _peeked_part(iterator, strategy) or _first_batch(iterator, strategy)
        attach(model, _BatchSpec(keras.tree.map_structure(_make_spec, data_batch)))
        _build_again(model)

    return _maybe_symbolic_build


def _build_again(model: keras.Model) -> None:
    """Creates the variables that a step of `model` needs, if its data has been inspected. A step
    that creates variables cannot run on replicas."""
    if (batch := attached(model, _BatchSpec)) is not None:
        with model.distribute_strategy.scope():
            model._symbolic_build(data_batch=batch.spec)
    _adapt_parts(model)


def _make_spec(value: Any) -> Any:
    return None if value is None else tf.TensorSpec(value.shape, value.dtype)


def _warn_of_uneven_batches(model: keras.Model, iterator: Any) -> None:
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    adapter = iterator.data_adapter
    dataset = getattr(adapter, "_dataset", None)
    if isinstance(dataset, tf.distribute.DistributedDataset):
        return  # already distributed by the caller; Keras 3 does not know how, either
    batch = adapter.batch_size
    if batch is None and isinstance(dataset, tf.data.Dataset):
        batch = batch_size(dataset)
    first_worker = not getattr(strategy.cluster_resolver, "task_id", 0)
    is_right = batch is None or batch % replicas == 0
    if is_right or not first_worker or not mark(model, "warned of uneven batches"):
        return
    fewer, more = batch // replicas, batch // replicas + 1
    evenly = " or ".join(str(each * replicas) for each in (fewer, more) if each)
    warnings.warn(
        f"The global batch of {batch} samples is not divisible by the {replicas} replicas of "
        f"{type(strategy).__name__}. The results are correct, but in every step all replicas wait "
        f"for those with the most samples. A batch of {evenly} is split evenly; "
        "`keras_distplug.global_batch(per_replica)` computes it.",
        stacklevel=2,
    )


def _first_spec(iterator: Any) -> Any:
    """Returns the shapes and dtypes of a replica's batch; None if only a batch would show them.

    Reading a batch would consume it if it comes from a generator, and would use up the first order
    of a shuffled dataset.
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


def _inspected_batch(iterator: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns a first batch, from which Keras builds the model's variables. Unlike Keras, it does
    not consume a batch of a Python generator, and accepts strings."""
    if (peeked := _peeked_part(iterator, strategy)) is not None:
        return peeked
    dataset = iterator._distributed_dataset
    if isinstance(dataset, LateDistributedDataset):
        if (spec := _first_spec(iterator)) is not None:
            dataset.note_looked()
            return spec
    elif isinstance(given := getattr(iterator.data_adapter, "_dataset", None), tf.data.Dataset):
        earlier_passes.add(given, made=1, read=1)
    return _first_batch(iterator, strategy)


def _peeked_part(iterator: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns a replica's part of the first batch of a Python generator; None for other data."""
    replicas = strategy.num_replicas_in_sync

    def part(value: Any) -> Any:
        return value[: -(-value.shape[0] // replicas)] if getattr(value, "shape", ()) else value

    batch = peeked_batch(iterator.data_adapter)
    return None if batch is None else keras.tree.map_structure(part, batch)


def inspects_a_batch(model: keras.Model) -> bool:
    """True if `fit` and `evaluate` inspect a batch of `model`'s data before iterating over it."""
    return model._distribute_strategy is not None and "_maybe_symbolic_build" not in vars(model)


def _first_batch(iterator: Any, strategy: tf.distribute.Strategy) -> Any:
    for item in iterator:  # (step, iterator) in Keras 3.10, (begin, end, iterator) since
        return keras.tree.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], next(item[-1])
        )
    return None


def _make_additional_loss(model: keras.Model) -> Callable[[Any], Any]:
    stock = model._aggregate_additional_loss
    return lambda loss: losses.zero_without_samples(stock(loss))


def _make_ordered_predict(model: keras.Model) -> Callable[..., Any]:
    stock = model.predict

    def predict(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, tf.data.Dataset):
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = (
                tf.data.experimental.AutoShardPolicy.DATA
            )
            x = x.with_options(options)
        return stock(x, *args, **kwargs)

    return predict


def _make_split_predict(model: keras.Model) -> Callable[..., Any]:
    def predict_on_batch(x: Any) -> Any:
        model.make_predict_function()
        outputs = model.predict_function([(steps.split(x, model.distribute_strategy),)])
        return keras.tree.map_structure(keras_trainer.convert_to_np_if_not_ragged, outputs)

    return predict_on_batch
