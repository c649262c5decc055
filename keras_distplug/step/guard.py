"""A step that leaves the model as it is where its gradients or loss are not finite."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas import gates, optimizers, share
from keras_distplug.backend.tensorflow.replicas.touched import Touched
from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.backend.tensorflow.runtime.override import override
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled, replicas_here
from keras_distplug.backend.tensorflow.trainer import adapt
from keras_distplug.step.diagnosis import Diagnosis, diagnose
from keras_distplug.step.gradients import dense, size_of
from keras_distplug.step.spikes import Window
from keras_distplug.step.stopwatch import Heard, Stopwatch

_Seen = tuple[tf.Tensor, ...]  # updates, loss, norm, both scores, and which gradients are finite

_GUARD = "_distplug_guard"


class _Part(Enum):
    """What a guard may be wanted for."""

    GATE = auto()
    STOPWATCH = auto()
    SYNCS = auto()
    READINGS = auto()
    FINGERPRINTS = auto()
    STEPS = auto()


@dataclass(frozen=True)
class Fault:
    """What one replica had in a step whose update was not applied.

    Args:
        replica: Its number among all replicas of all workers.
        optimizer: That whose update it was, as the model's attribute.
        updates: How many that one had applied before.
        call: Which one it was of those that the optimizer applies in a step, from 0.
        loss: Its own; None where the step does not take it from `compute_loss`.
        norm: Of its own gradients.
        score: How far the norm of the sum of all replicas' gradients is from those before it, by
            `Window`; None where that is not finite, or not asked for.
        loss_score: The same for the mean of all samples' losses.
        variables: Paths of those whose gradients, of this replica alone, are not finite.
        batch: Its part of the batch, as the step got it; None where a function within the step
            applies the update, or where it has sparse or ragged tensors.
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
        """Whether what this replica has itself is."""
        return not self.variables and (self.loss is None or math.isfinite(self.loss))


class Guard:
    """Stands before the optimizers of a model while that is trained by `fit`.

    An update whose gradients, summed over all replicas, or whose loss on any replica, are not
    finite is not applied anywhere; what else such a step assigned (metrics, the statistics of
    BatchNormalization) is put back. That is decided in the step, with no collective of its own: a
    replica whose loss is not finite sends NaN as one of its gradients. The draws of random layers,
    and the batch, are used up.

    A `LossScaleOptimizer` leaves out by itself what its scale makes overflow; there, the loss
    decides, or data that are not finite.
    """

    def __init__(self, model: keras.Model) -> None:
        self.max_score: float | None = None
        self._windows: dict[str, list[Window]] = {}  # of what, for each replica of this process
        self._model = model
        self._faults: list[Fault] = []
        self.steps = 0  # that this process has taken while `want_steps` asked for it
        self.stopwatch = Stopwatch()
        self._wanted: set[_Part] = set()
        self._there: set[_Part] = set()
        self._is_in_place = False
        self._history: Any = None  # of the `fit` that is under way
        self.sees_updates = False  # once traced: whether an optimizer has been asked to apply
        self.calls: dict[str, int] = {}  # by optimizer: how many updates a step has
        self._traced: dict[str, _Traced] = {}
        self._stock: dict[str, Any] = {}

    def faults(self) -> list[Fault]:
        """Those of this process's replicas since the last call."""
        told, self._faults = self._faults, []
        return told

    def diagnose(self, batch: Any) -> Diagnosis:
        """Computes a step of a fault's batch once more, by itself."""
        return diagnose(self._model, batch, self._stock["train_step"])

    @classmethod
    def of(cls, model: keras.Model) -> Guard:
        """That of `model`, which is adapted."""
        guard: Guard | None = vars(adapt(model)).get(_GUARD)
        if guard is None:
            guard = cls(model)
            override(model, _GUARD, guard)
        return guard

    def windows(self) -> dict[str, list[float]]:
        """What is known of the losses and the norms of each optimizer's gradients."""
        return {what: replicas[0].state() for what, replicas in self._windows.items()}

    def set_windows(self, known: Mapping[str, Sequence[float]]) -> None:
        for what, replicas in self._windows.items():
            for window in replicas:
                window.set_state(known.get(what, []))

    def _window_of(self, what: str) -> Window:
        """That of this replica: each keeps its own, which are the same."""
        replicas = self._windows[what]
        number = tf.get_static_value(_number_of_replica())
        return replicas[int(number) % len(replicas)]

    def _name_of(self, optimizer: keras.optimizers.Optimizer) -> str:
        named = models.optimizers_of(self._model)
        return next(name for name, each in named.items() if each is optimizer)

    # Being there, for one `fit`

    def want(self, max_score: float | None = None) -> None:
        """To be called before each `fit` that shall be guarded, from a callback's `set_model`.

        Args:
            max_score: An update whose loss, or gradients' norm, is farther above those before, by
                the score of `Window`, is not applied either.
        """
        self._wanted.add(_Part.GATE)
        self._faults = []
        if max_score != self.max_score:
            self.max_score = max_score
            self._trace_anew()
        model = self._model
        here = replicas_here(model.distribute_strategy)
        for name in models.optimizers_of(model):
            if max_score is not None and _norms_of(name) not in self._windows:
                for what, by_logarithm in ((_norms_of(name), True), (_losses_of(name), False)):
                    self._windows[what] = [Window(by_logarithm=by_logarithm) for _ in range(here)]
        self._put_in_place()

    def want_times(
        self, *, syncs: bool = False, readings: bool = False, fingerprints: bool = False
    ) -> Heard:
        """As `want`, for the times that replicas take.

        Args:
            syncs: Whether those are wanted, too, from their own gradients to the sum of all.
            readings: Whether laps have a `Reading`.
            fingerprints: Whether they have a fingerprint of the replica's part of the batch.
        """
        if is_scheduled(self._model.distribute_strategy):
            return self.stopwatch.listen()  # to nothing: workers cannot call Python here
        if _Part.STOPWATCH not in self._wanted:
            self.stopwatch.forget_listeners()
        self._wanted.add(_Part.STOPWATCH)
        if syncs:
            self._wanted.add(_Part.SYNCS)
        if readings:
            self._wanted.add(_Part.READINGS)
        if fingerprints:
            self._wanted.add(_Part.FINGERPRINTS)
        self._put_in_place()
        return self.stopwatch.listen()

    def want_steps(self) -> None:
        """As `want`, for the number of `steps`."""
        self._wanted.add(_Part.STEPS)
        self._put_in_place()

    def unwant(self) -> None:
        """To be called where it was not `fit` that called `set_model`."""
        self._wanted = set()

    def _put_in_place(self) -> None:
        model = self._model
        if _Part.GATE in self._wanted | self._there:
            gates.never_note_assignments(models.seeds_of(model))
            gates.note_assignments([*model.non_trainable_variables, *model.metrics_variables])
        for optimizer in models.optimizers_of(model).values():
            optimizers.give_gate(optimizer)
            gates.put_before(optimizer, self)
        own = self._own()
        if self._is_in_place:
            # The script may have given the model another step since.
            own = {name: each for name, each in own.items() if vars(model).get(name) != each}
            if not own:
                return
        for name, each in own.items():
            self._stock[name] = getattr(model, name)
            override(model, name, each)
        self._trace_anew()
        self._is_in_place = True

    def _own(self) -> dict[str, Any]:
        """Methods that take the place of the model's."""
        return {
            "train_step": self._train_step,
            "compute_loss": self._compute_loss,
            "make_train_function": self._make_train_function,
        }

    def _take_away(self) -> None:
        for name, own in self._own().items():
            if vars(self._model).get(name) == own:
                override(self._model, name, self._stock[name])
        for optimizer in models.optimizers_of(self._model).values():
            gates.put_before(optimizer, None)
        self._trace_anew()
        self._is_in_place = False

    def _trace_anew(self) -> None:
        self._model.train_function = None
        Touched.of(self._model).draws.keep()

    def _make_train_function(self, force: bool = False) -> Any:
        """Keras calls it in each `fit`, behind the callbacks' `set_model`."""
        wanted, self._wanted = self._wanted, set()
        history = getattr(self._model, "history", None)
        if not wanted and history is self._history and models.is_in_fit(self._model):
            wanted = self._there  # a callback calls it, in the same `fit`
        self._history = history
        if not wanted:
            self._take_away()
            return self._model.make_train_function(force)
        self._put_in_place()  # of new optimizers
        if wanted != self._there:
            self._there, force = wanted, True
            self._trace_anew()
        with _not_compiled(self._model):
            return self._stock["make_train_function"](force)

    # The step

    def _train_step(self, data: Any) -> Any:
        stock = self._stock["train_step"]
        if _Part.STEPS in self._there:
            self._count_step()
        if not self._model.jit_compile:
            found, _ = self._guarded(stock, data, is_compiled=False)
            return found
        # XLA cannot call Python. So it compiles what is inside of a step that can.
        compiled = tf.function(
            functools.partial(self._guarded, stock, is_compiled=True),
            jit_compile=True,
            reduce_retracing=True,
            autograph=False,
        )
        found, told = compiled(data)
        for (name, call), (ok, seen) in told.items():
            self._tell_unless(ok, name, call, functools.partial(tuple, seen), data)
        return found

    def _count_step(self) -> None:
        number = tf.get_static_value(_number_of_replica())
        if int(number) % replicas_here(self._model.distribute_strategy) == 0:
            guard = weakref.ref(self)  # TensorFlow keeps what it calls, and its graphs, for good

            def count() -> np.ndarray:
                if (counts := guard()) is not None:
                    counts.steps += 1
                return np.zeros([], np.int32)

            tf.numpy_function(count, [], tf.int32)

    def _guarded(self, stock: Callable[[Any], Any], data: Any, *, is_compiled: bool) -> Any:
        begun = None
        if _Part.STOPWATCH in self._there and not is_compiled:
            data, begun = self.stopwatch.begun(data)
        with _replica(data, is_compiled) as replica, gates.assignments_noted() as assigned:
            replica.begun = begun
            found = stock(data)
            oks = [ok for ok in replica.oks if gates.is_here(ok)]
            if oks:
                finish = functools.partial(assigned.keep_if, tf.reduce_all(tf.stack(oks)))
                together = share.current()
                if together is None:
                    finish()
                else:
                    together.at_end.append(finish)
        return found, replica.told

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._stock["compute_loss"](*args, **kwargs)
        if _current.replica is not None and loss is not None:
            _current.replica.note_loss(loss)
        return loss

    # The gate of optimizers

    def mark(self, optimizer: keras.optimizers.Optimizer, own: Sequence[Any]) -> Sequence[Any]:
        replica = _current.replica
        if replica is None or all(gradient is None for gradient in own):
            return own
        if replica.begun is not None and gates.is_here(replica.begun):
            reading = self._reading(replica, optimizer, own)
            fingerprinted = replica.plain_data() if _Part.FINGERPRINTS in self._there else ()
            own, computed = self.stopwatch.computed(replica.begun, own, reading, fingerprinted)
            replica.begun = None  # the first optimizer's gradients are the ones
            if _Part.SYNCS in self._there and _is_one_of_several():
                replica.computed[id(optimizer)] = computed
        if _Part.GATE not in self._there or not replica.losses or _scales(optimizer):
            return own
        present = [i for i, gradient in enumerate(own) if gradient is not None]
        place = min(present, key=lambda i: size_of(own[i]))
        return [
            *own[:place],
            _spoiled_unless(replica.has_sound_loss(), own[place]),
            *own[place + 1 :],
        ]

    def _reading(
        self, replica: _Replica, optimizer: keras.optimizers.Optimizer, own: Sequence[Any]
    ) -> tuple[tf.Tensor, ...]:
        if _Part.READINGS not in self._there:
            return ()
        together = share.current()
        factor = tf.ones([])
        if together is not None:  # from this one's part in the mean over all samples to its own
            factor *= together.replicas
            if id(optimizer) in together.in_loss:
                factor = tf.math.divide_no_nan(factor, together.weight)
        if _scales(optimizer) and optimizer.built:
            factor /= tf.cast(optimizer.dynamic_scale, tf.float32)
        norm = factor * replica.norm(own)
        loss = replica.loss() if replica.losses else tf.constant(math.nan)
        return replica.samples(), loss, norm

    def received(
        self, optimizer: keras.optimizers.Optimizer, summed: Sequence[Any]
    ) -> Sequence[Any]:
        replica = _current.replica
        computed = None if replica is None else replica.computed.pop(id(optimizer), None)
        if computed is None or not gates.is_here(computed):
            return summed
        return self.stopwatch.summed(computed, summed)

    def opens(
        self,
        optimizer: keras.optimizers.Optimizer,
        own: Sequence[Any],
        summed: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> tf.Tensor | None:
        replica = _current.replica
        is_gate = _Part.GATE in self._there
        if replica is None or not is_gate or all(gradient is None for gradient in summed):
            return None
        norm = replica.norm_of_sum(summed)
        name = self._name_of(optimizer)
        score = loss_score = tf.constant(math.nan)
        if _scales(optimizer):
            # A finite loss whose gradients are not is mostly due to the scale. But some kernels
            # make numbers of the NaN they are given.
            due_to_data = ~replica.has_sound_data() & ~tf.math.is_finite(norm)
            ok = _on_all(replica.has_sound_loss() & ~due_to_data)
        else:
            ok = tf.math.is_finite(norm)
        if self.max_score is not None and not _scales(optimizer):
            norms = self._window_of(_norms_of(name))
            score = norms.score(norm)
            ok &= score <= self.max_score
            if replica.losses:
                losses, mean = self._window_of(_losses_of(name)), replica.loss_of_all()
                loss_score = losses.score(mean)
                ok &= loss_score <= self.max_score
                losses.learn_if(ok, mean)
            norms.learn_if(ok, norm)
        replica.oks.append(ok)
        self.sees_updates = True
        call = replica.calls[name]
        replica.calls[name] += 1
        self.calls[name] = call + 1
        pairs = [(v, g) for v, g in zip(variables, own, strict=True) if g is not None]
        self._traced[name] = _Traced(
            tuple(variable.path for variable, _ in pairs), bool(replica.losses)
        )
        updates, loss = tf.identity(optimizer.iterations), replica.loss()

        def seen() -> _Seen:
            own_norm = replica.norm(own)
            soundness = tf.stack([_is_sound(gradient) for _, gradient in pairs])
            return updates, loss, own_norm, score, loss_score, soundness

        if replica.is_compiled:
            replica.told[name, call] = (ok, seen())
        else:
            self._tell_unless(ok, name, call, seen, replica.data)
        return ok

    def _tell_unless(
        self,
        ok: tf.Tensor,
        optimizer: str,
        call: int,
        seen: Callable[[], _Seen],
        data: Any,
    ) -> None:
        """Has the host told what this replica has, unless all is well."""
        number = _number_of_replica()
        traced = self._traced[optimizer]
        flat = tf.nest.flatten(data)
        if not all(each is None or (_is_plain(each) and gates.is_here(each)) for each in flat):
            data = None

        guard = weakref.ref(self)  # as above

        def note(number: Any, updates: Any, *told: Any) -> np.ndarray:
            loss, norm, score, loss_score, soundness, *flat = told
            if (notes := guard()) is None:
                return np.zeros([], np.int32)
            notes._faults.append(
                Fault(
                    int(number),
                    optimizer,
                    int(updates),
                    call,
                    float(loss) if traced.has_loss else None,
                    float(norm),
                    float(score) if np.isfinite(score) else None,
                    float(loss_score) if np.isfinite(loss_score) else None,
                    tuple(v for v, ok in zip(traced.variables, soundness, strict=True) if not ok),
                    _packed(data, flat),
                )
            )
            return np.zeros([], np.int32)

        def tell() -> tf.Tensor:
            flat = tf.nest.flatten(data)
            given = [number, *seen(), *(each for each in flat if each is not None)]
            return tf.reshape(tf.numpy_function(note, given, tf.int32), [])

        tf.cond(ok, lambda: tf.zeros([], tf.int32), tell)


@dataclass(frozen=True)
class _Traced:
    """What is known of an optimizer's updates when a step is traced."""

    variables: tuple[str, ...]
    has_loss: bool


class _Replica:
    """A step as one replica takes it, as tensors of its trace."""

    def __init__(self, data: Any, is_compiled: bool) -> None:
        self.data = data
        self.is_compiled = is_compiled
        self._losses: list[tf.Tensor] = []
        self.oks: list[tf.Tensor] = []
        self.begun: tf.Tensor | None = None
        self.computed: dict[int, tf.Tensor] = {}  # by optimizer: when its gradients were there
        self.told: dict[tuple[str, int], tuple[tf.Tensor, _Seen]] = {}
        self.calls: Counter[str] = Counter()  # by optimizer: how many updates there are so far
        self._half_squares: dict[int, tuple[Any, tf.Tensor]] = {}

    @property
    def losses(self) -> list[tf.Tensor]:
        return [loss for loss in self._losses if gates.is_here(loss)]

    def note_loss(self, loss: tf.Tensor) -> None:
        self._losses.append(loss)

    def loss(self) -> tf.Tensor:
        if not self.losses:
            return tf.zeros([])
        together = share.current()
        # Keras divides a replica's loss by their number.
        replicas = 1 if together is None else together.replicas
        return tf.reduce_sum([tf.cast(loss, tf.float32) * replicas for loss in self.losses])

    def loss_of_all(self) -> tf.Tensor:
        """The mean of all samples' losses, on all replicas."""
        together = share.current()
        if together is None:
            return self.loss()
        part = tf.where(together.has_samples, together.samples * self.loss(), 0.0)
        return together.summed(part) / together.total

    def samples(self) -> tf.Tensor:
        together = share.current()
        return share.samples_of(self.data) if together is None else together.samples

    def plain_data(self) -> list[tf.Tensor]:
        flat = tf.nest.flatten(self.data)
        return [each for each in flat if _is_plain(each) and gates.is_here(each)]

    def norm(self, gradients: Sequence[Any]) -> tf.Tensor:
        """To read a gradient takes as long as the rest of the guard together: each is read once."""
        halves = []
        for gradient in gradients:
            if gradient is None:
                continue
            _, half = self._half_squares.get(id(gradient), (None, None))
            if half is None or not gates.is_here(half):
                half = _half_square(gradient)
                self._half_squares[id(gradient)] = gradient, half
            halves.append(half)
        return tf.sqrt(2 * tf.add_n(halves))

    def norm_of_sum(self, summed: Sequence[Any]) -> tf.Tensor:
        """Of what all replicas have the same."""
        if not _is_one_of_several():
            return self.norm(summed)
        context = tf.distribute.get_replica_context()
        present = [dense(gradient) for gradient in summed if gradient is not None]
        return gates.of_first(
            context, lambda each: tf.sqrt(2 * tf.add_n([*map(_half_square, each)])), present
        )

    def has_sound_data(self) -> tf.Tensor:
        flat = tf.nest.flatten(self.data, expand_composites=True)
        floats = [each for each in flat if each is not None and each.dtype.is_floating]
        return tf.reduce_all([_is_sound(each) for each in floats] or [True])

    def has_sound_loss(self) -> tf.Tensor:
        sound = tf.math.is_finite(self.loss())
        together = share.current()
        return sound if together is None else sound | ~together.has_samples


class _Current(threading.local):
    replica: _Replica | None = None  # replicas are traced in threads


_current = _Current()


@contextmanager
def _replica(data: Any, is_compiled: bool) -> Iterator[_Replica]:
    before, _current.replica = _current.replica, _Replica(data, is_compiled)
    try:
        yield _current.replica
    finally:
        _current.replica = before


@contextmanager
def _not_compiled(model: keras.Model) -> Iterator[None]:
    before = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = before


def _norms_of(optimizer: str) -> str:
    return f"{optimizer}, norms"


def _losses_of(optimizer: str) -> str:
    return f"{optimizer}, losses"


def _number_of_replica() -> Any:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def _is_one_of_several() -> bool:
    return bool(tf.distribute.get_replica_context().num_replicas_in_sync > 1)


def _scales(optimizer: keras.optimizers.Optimizer) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _half_square(gradient: Any) -> tf.Tensor:
    return tf.nn.l2_loss(tf.cast(dense(gradient), tf.float32))


def _is_sound(gradient: Any) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(dense(gradient)))


def _spoiled_unless(sound: tf.Tensor, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _spoiled_unless(sound, gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.where(sound, gradient, tf.cast(math.nan, gradient.dtype))


def _on_all(sound: tf.Tensor) -> tf.Tensor:
    """Whether it is so on all replicas."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return sound
    unsound = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(~sound, tf.float32))
    return tf.equal(unsound, 0)


def _packed(data: Any, flat: Sequence[Any]) -> Any:
    """The values of `data`, in its structure."""
    values = iter(flat)
    filled = [None if each is None else next(values) for each in tf.nest.flatten(data)]
    return tf.nest.pack_sequence_as(data, filled)


def _is_plain(value: Any) -> bool:
    return isinstance(value, tf.Tensor)
