"""`fit`, `evaluate` and `predict` of Keras 3 under (MultiWorker)MirroredStrategy.

What is wrong upstream (Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21; keras-team/keras#20585,
tensorflow/tensorflow#72388, ray-project/ray#47464):

- `TensorFlowTrainer._maybe_symbolic_build` reduces the per-replica structure of the first batch
  with `strategy.reduce`, which raises ValueError on several workers.
- `reduce_per_replica` reduces scalar logs over axis 0, which raises on several workers.
- Each replica's loss counts equally, however many samples the replica got: wrong gradients for
  an uneven last batch (5e-2 off for 150 samples in batches of 64 on two replicas).
- The optimizer clips each replica's gradients before their sum instead of after it, and asks each
  replica alone whether the gradients are finite.
- `while_loop` over several steps (`steps_per_execution`) cannot hold a collective.
- BatchNormalization's moving statistics differ between replicas: their aggregation is NONE.
- `predict` on a dataset read from files puts the outputs in the order of the files' shards.

Every override sits on the one model (and its optimizer) that was adapted.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from keras_distplug.compat.model import optimizers_of

_MARK = "_distplug_adapted"
_STOCK_BUILD = "_distplug_stock_maybe_symbolic_build"


def adapt(model: keras.Model) -> keras.Model:
    """Makes `fit`, `evaluate` and `predict` of `model` right under its strategy.

    Does nothing for a model of one replica on one worker, or when called again. A `train_step` of
    your own takes its loss from `self.compute_loss` (or divides it by the number of replicas), as
    under any `tf.distribute` strategy: gradients of the replicas are summed.

    Args:
        model: A Keras model made inside `strategy.scope()`.

    Returns:
        The same model.
    """
    strategy = model.distribute_strategy
    if is_adapted(model) or not (strategy.num_replicas_in_sync > 1 or is_multi_worker(strategy)):
        return model
    share = _Share()
    _override(model, _MARK, True)
    _override(model, "_maybe_symbolic_build", _symbolic_build(model))
    _override(model, "_make_function", _make_function(model))
    _override(model, "train_step", _weighted_train_step(model, share))
    _override(model, "predict", _ordered_predict(model))
    for optimizer in optimizers_of(model).values():
        _reduce_before_clipping(optimizer, share)
    for function in ("train_function", "test_function", "predict_function"):
        setattr(model, function, None)
    return model


def is_adapted(model: keras.Model) -> bool:
    return bool(model.__dict__.get(_MARK, False))


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    return bool(keras_trainer._collective_all_reduce_multi_worker(strategy))


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


class _Share(threading.local):
    """What this replica's part of the global batch counts. Replicas are traced in threads.

    Keras divides every replica's mean loss by the number of replicas R, so a replica that holds n
    of the N samples of the global batch has to count R * n / N times.
    """

    weight: tf.Tensor | None = None
    in_loss: bool = False  # the loss has been weighted, so the gradients must not be


def _override(target: object, name: str, value: Any) -> None:
    # Keras tracks attributes that are set the usual way.
    object.__setattr__(target, name, value)


def _symbolic_build(model: keras.Model) -> Callable[..., None]:
    strategy = model.distribute_strategy

    def _maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None:
            for item in iterator:  # (step, iterator) in Keras 3.10, (begin, end, iterator) since
                data_batch = keras.tree.map_structure(
                    lambda value: strategy.experimental_local_results(value)[0], next(item[-1])
                )
                break
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)
        _average_statistics(model)

    return _maybe_symbolic_build


def _average_statistics(model: keras.Model) -> None:
    """Makes replicas agree on state they each compute from their own part of the batch."""
    for variable in model.non_trainable_variables:
        mirrored = variable.value
        if (
            mirrored.dtype.is_floating
            and getattr(mirrored, "_aggregation", None) == tf.VariableAggregation.NONE
        ):
            mirrored._aggregation = tf.VariableAggregation.MEAN


def _make_function(model: keras.Model) -> Callable[..., Any]:
    strategy = model.distribute_strategy

    def _make_function(step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step_and_average(data: Any) -> Any:
            data = keras.tree.map_structure(_of_any_batch_size, data)
            return _mean_over_replicas(step_function(data))

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def one_step_on_data(data: Any) -> Any:
            outputs = strategy.run(step_and_average, args=(data,))
            return keras.tree.map_structure(
                lambda value: strategy.experimental_local_results(value)[0], outputs
            )

        if not model.run_eagerly:
            one_step_on_data = tf.function(
                one_step_on_data, reduce_retracing=True, jit_compile=model.jit_compile
            )
        if hasattr(model, "_autoconvert_optionals"):  # Keras 3.11 and newer
            one_step_on_data = model._autoconvert_optionals(one_step_on_data)

        def function(iterator: Any) -> Any:
            outputs = None
            for _ in range(model.steps_per_execution):
                data = _next_or_none(iterator)
                if data is None:
                    if outputs is None:
                        raise tf.errors.OutOfRangeError(None, None, "End of sequence")
                    break
                outputs = one_step_on_data(data.value)
            return outputs

        return function

    return _make_function


def _of_any_batch_size(value: Any) -> Any:
    """Hides the number of samples from the trace, as a dataset's iterator does inside a function.

    Keras weights the losses of single outputs by it where it is known, and by 1 where it is not.
    """
    if tf.executing_eagerly() or not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])


class _Batch:
    """Tells a batch that is None from no batch."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _next_or_none(iterator: Any) -> _Batch | None:
    if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
        return next((_Batch(data) for data in iterator), None)
    optional = iterator.get_next_as_optional()
    return _Batch(optional.get_value()) if optional.has_value() else None


def _mean_over_replicas(outputs: Any) -> Any:
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


def _weighted_train_step(model: keras.Model, share: _Share) -> Callable[[Any], Any]:
    stock = model.train_step

    def train_step(data: Any) -> Any:
        context = tf.distribute.get_replica_context()
        first = next(value for value in keras.tree.flatten(data) if value is not None)
        samples = tf.cast(tf.shape(first)[0], tf.float32)
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, samples)
        share.weight = samples * context.num_replicas_in_sync / total
        share.in_loss = False
        try:
            return stock(data)
        finally:
            share.weight = None

    return train_step


def _ordered_predict(model: keras.Model) -> Callable[..., Any]:
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


def _reduce_before_clipping(optimizer: keras.optimizers.Optimizer, share: _Share) -> None:
    """Weights each replica by its samples and sums gradients before anything else is done to them.

    The weight belongs on the loss: a layer that talks to other replicas, such as synchronized
    BatchNormalization, sends gradients there. Gradients are weighted where a custom `train_step`
    does not call `optimizer.scale_loss`.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    stock_apply = optimizer.apply
    stock_scale_loss = optimizer.scale_loss

    def scale_loss(self: Any, loss: Any) -> Any:
        if share.weight is not None:
            loss = loss * tf.cast(share.weight, loss.dtype)
            share.in_loss = True
        return stock_scale_loss(loss)

    def apply(self: Any, grads: Iterable[Any], trainable_variables: Any = None) -> Any:
        context = tf.distribute.get_replica_context()
        if context is not None:
            weight = None if share.in_loss else share.weight
            grads = _summed(list(grads), weight, context)
        return stock_apply(grads, trainable_variables)

    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Iterable[Any]) -> list[Any]:
        return list(grads_and_vars)

    for target, method in (
        (optimizer, scale_loss),
        (optimizer, apply),
        (inner, _all_reduce_sum_gradients),
    ):
        _override(target, method.__name__, types.MethodType(method, target))


def _summed(
    grads: Sequence[Any], weight: tf.Tensor | None, context: tf.distribute.ReplicaContext
) -> list[Any]:
    """Sums `grads` over replicas, each times its `weight`; None stays None."""
    present = [i for i, grad in enumerate(grads) if grad is not None]
    if not present:
        return list(grads)
    weighted = [grads[i] if weight is None else _scaled(grads[i], weight) for i in present]
    result = list(grads)
    for i, grad in zip(
        present, context.all_reduce(tf.distribute.ReduceOp.SUM, weighted), strict=True
    ):
        result[i] = grad
    return result


def _scaled(grad: Any, factor: tf.Tensor) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
