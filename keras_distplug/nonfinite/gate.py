"""A gate in the training step that skips an update if its gradients or loss are not finite."""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas import gates, share
from keras_distplug.backend.tensorflow.replicas.gates import dense
from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.backend.tensorflow.runtime.workers import replicas_here
from keras_distplug.nonfinite.spikes import Window
from keras_distplug.step.instrumentation import StepInstrument
from keras_distplug.step.replica_step import ReplicaStep, call_unless, get_size, scales_loss

# Updates, loss, norm, both scores, and which gradients are finite.
_Observed = tuple[tf.Tensor, ...]


@dataclass(frozen=True)
class Fault:
    """The values of one replica in a step whose update was not applied.

    Args:
        replica: Its number among all replicas of all workers.
        optimizer: The model's attribute that holds the update's optimizer.
        updates: The number of updates that this optimizer had applied before.
        call: The index of the update among those that the optimizer applies in one step, from 0.
        loss: The replica's loss; None if the step does not compute it with `compute_loss`.
        norm: The norm of the replica's gradients.
        score: The score by `Window` of the norm of all replicas' summed gradients; None if it is
            not finite or not enabled.
        loss_score: The same for the mean of all samples' losses.
        variables: The paths of variables for which this replica's own gradients are not finite.
        batch: The replica's part of the batch; None if a function within the step applies the
            update, or if the batch has sparse or ragged tensors.
    """

    replica: int
    optimizer: str
    updates: int
    call: int
    loss: float | None
    norm: float
    score: float | None
    loss_score: float | None
    variables: tuple[str, ...]
    batch: Any

    @property
    def is_finite(self) -> bool:
        """True if this replica's own loss and gradients are finite."""
        return not self.variables and (self.loss is None or math.isfinite(self.loss))


class NaNGate(StepInstrument):
    """Prevents updates for which the gradients, summed over all replicas, or the loss of any
    replica are not finite.

    The decision is made within the step, without an additional collective: a replica whose loss is
    not finite sends NaN as one of its gradients.

    A `LossScaleOptimizer` skips updates that its scale makes overflow on its own; with it, only
    non-finite losses or data count.
    """

    decides = True

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.max_score: float | None = None
        self._windows: dict[str, list[Window]] = {}  # by quantity, one per replica of this process
        self._faults: list[Fault] = []
        self.sees_updates = False  # true once a traced step applies an update
        self.calls: dict[str, int] = {}  # by optimizer: the number of updates per step
        self._traced: dict[str, _Traced] = {}

    def set_up(self, max_score: float | None = None) -> None:
        """Prepares for a `fit`; must be called before every one.

        Args:
            max_score: An update is not applied either if the score by `Window` of its loss or of
                its gradients' norm is greater than this. Defaults to `None`: no such limit.
        """
        self._faults = []
        self.max_score = max_score
        here = replicas_here(self._model.distribute_strategy)
        for name in models.list_optimizers(self._model) if max_score is not None else ():
            for what, by_logarithm in ((_norms_key(name), True), (_losses_key(name), False)):
                if what not in self._windows:
                    self._windows[what] = [Window(by_logarithm=by_logarithm) for _ in range(here)]

    def faults(self) -> list[Fault]:
        """Returns the faults of this process's replicas since the last call."""
        if not self._faults:
            return []
        found, self._faults = self._faults, []
        return found

    def windows(self) -> dict[str, list[float]]:
        """Returns the state of the windows of losses and gradient norms of all optimizers."""
        return {what: replicas[0].state() for what, replicas in self._windows.items()}

    def set_windows(self, known: Mapping[str, Sequence[float]]) -> None:
        for what, replicas in self._windows.items():
            for window in replicas:
                window.set_state(known.get(what, []))

    def _get_window(self, what: str, step: ReplicaStep) -> Window:
        """Returns this replica's window. Every replica has one, with the same values."""
        replicas = self._windows[what]
        return replicas[int(tf.get_static_value(step.replica)) % len(replicas)]

    def _optimizer_name(self, optimizer: keras.optimizers.Optimizer) -> str:
        named = models.list_optimizers(self._model)
        return next(name for name, each in named.items() if each is optimizer)

    # The hooks of an instrument

    def signature(self) -> Hashable:
        return self.max_score

    def after_gradients(
        self,
        step: ReplicaStep,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Any],
    ) -> Sequence[Any]:
        if not step.losses or scales_loss(optimizer) or not step.is_one_of_several:
            return gradients
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        place = min(present, key=lambda i: get_size(gradients[i]))
        spoiled = _poison_unless(_has_sound_loss(step), gradients[place])
        return [*gradients[:place], spoiled, *gradients[place + 1 :]]

    def allows(
        self,
        step: ReplicaStep,
        optimizer: keras.optimizers.Optimizer,
        own: Sequence[Any],
        summed: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> tf.Tensor | None:
        half_square = step.half_square_of_sum(summed)
        name = self._optimizer_name(optimizer)
        score = loss_score = tf.constant(math.nan)
        if scales_loss(optimizer):
            # If only the gradients are not finite, the cause is usually the scale. But some kernels
            # turn NaN in their inputs into numbers, so check the data as well.
            due_to_data = ~_has_sound_data(step) & ~tf.math.is_finite(half_square)
            ok = _all_replicas(_has_sound_loss(step) & ~due_to_data)
        else:
            ok = tf.math.is_finite(half_square)
            if step.losses and not step.is_one_of_several:
                ok &= _has_sound_loss(step)
        if self.max_score is not None and not scales_loss(optimizer):
            norm = tf.sqrt(2 * half_square)
            norms = self._get_window(_norms_key(name), step)
            score = norms.score(norm)
            ok &= score <= self.max_score
            if step.losses:
                losses, mean = self._get_window(_losses_key(name), step), step.loss_of_all()
                loss_score = losses.score(mean)
                ok &= loss_score <= self.max_score
                losses.learn_if(ok, mean)
            norms.learn_if(ok, norm)
        self.sees_updates = True
        calls: Counter[str] = step.notes.setdefault(NaNGate, Counter())
        call = calls[name]
        calls[name] += 1
        self.calls[name] = call + 1
        pairs = [(v, g) for v, g in zip(variables, own, strict=True) if g is not None]
        paths = tuple(variable.path for variable, _ in pairs)
        traced = self._traced[f"{name}, update {call}"] = _Traced(
            name, call, paths, bool(step.losses)
        )
        updates, loss = tf.identity(optimizer.iterations), step.loss()

        def seen() -> _Observed:
            own_norm = step.norm(own)
            soundness = tf.stack([_is_sound(gradient) for _, gradient in pairs])
            return updates, loss, own_norm, score, loss_score, soundness

        if step.is_compiled:
            step.carried[f"{name}, update {call}"] = (ok, seen())
        else:
            self._record_unless(ok, traced, seen, step)
        return ok

    def after(self, step: ReplicaStep, logs: Any) -> None:
        if step.is_compiled:
            for name in step.carried.keys() & self._traced.keys():
                ok, seen = step.carried[name]
                self._record_unless(ok, self._traced[name], functools.partial(tuple, seen), step)

    def _record_unless(
        self, ok: tf.Tensor, traced: _Traced, seen: Callable[[], _Observed], step: ReplicaStep
    ) -> None:
        """Adds operations that record a fault with this replica's values, unless `ok`."""
        batch, number = step.batch, step.replica
        if not all(
            each is None or (isinstance(each, tf.Tensor) and gates.is_here(each))
            for each in tf.nest.flatten(batch)
        ):
            batch = None

        gate = weakref.ref(self)  # TensorFlow never releases graphs and the functions they call

        def note(number: Any, updates: Any, *noted: Any) -> np.ndarray:
            loss, norm, score, loss_score, soundness, *flat = noted
            fault = Fault(
                int(number),
                traced.optimizer,
                int(updates),
                traced.call,
                float(loss) if traced.has_loss else None,
                float(norm),
                float(score) if np.isfinite(score) else None,
                float(loss_score) if np.isfinite(loss_score) else None,
                tuple(v for v, ok in zip(traced.variables, soundness, strict=True) if not ok),
                _pack(batch, flat),
            )
            if (notes := gate()) is not None:
                notes._faults.append(fault)
            return np.zeros([], np.int32)

        def noted() -> None:
            flat = tf.nest.flatten(batch)
            given = [number, *seen(), *(each for each in flat if each is not None)]
            tf.numpy_function(note, given, tf.int32)

        if step.is_compiled:
            call_unless(ok, noted)
        else:
            step.call_if_skipped(ok, noted)


@dataclass(frozen=True)
class _Traced:
    """The properties of an optimizer's update that are known when a step is traced."""

    optimizer: str
    call: int
    variables: tuple[str, ...]
    has_loss: bool


def _norms_key(optimizer: str) -> str:
    return f"{optimizer}, norms"


def _losses_key(optimizer: str) -> str:
    return f"{optimizer}, losses"


def _has_sound_data(step: ReplicaStep) -> tf.Tensor:
    flat = tf.nest.flatten(step.batch, expand_composites=True)
    floats = [each for each in flat if each is not None and each.dtype.is_floating]
    return tf.reduce_all([_is_sound(each) for each in floats] or [True])


def _has_sound_loss(step: ReplicaStep) -> tf.Tensor:
    sound = tf.math.is_finite(step.loss())
    together = share.current()
    return sound if together is None else sound | ~together.has_samples


def _is_sound(gradient: Any) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(dense(gradient)))


def _poison_unless(sound: tf.Tensor, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _poison_unless(sound, gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.where(sound, gradient, tf.cast(math.nan, gradient.dtype))


def _all_replicas(sound: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that is true if `sound` is true on all replicas."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return sound
    unsound = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(~sound, tf.float32))
    return tf.equal(unsound, 0)


def _pack(batch: Any, flat: Sequence[Any]) -> Any:
    """Packs flat values into the structure of a batch."""
    values = iter(flat)
    filled = [None if each is None else next(values) for each in tf.nest.flatten(batch)]
    return tf.nest.pack_sequence_as(batch, filled)
