"""Variables that several workers change concurrently, in separate steps.

Upstream bug with overlapping steps (Keras 3.10 to 3.15; no known issue): `assign_add` of Keras'
variables is `assign(self + value)`, and metrics, seeds and statistics use `assign`. Other workers'
updates between reading and writing are lost: 425 of 600 samples were counted. Optimizers are not
affected: they change weights with TensorFlow's own `assign_add`.

Therefore a step uses private values, as tensors, of all variables except those that optimizers
change: metrics start at zero, statistics at their current values. Finally, it adds its changes
to the variables, with one operation per variable. Metrics are sums over batches here, as they are
sums over replicas under other strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas import gates, replica_state, touched
from keras_distplug.backend.tensorflow.runtime.attached import mark
from keras_distplug.backend.tensorflow.runtime.models import list_optimizers, list_seed_generators
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(keras="3.10 to 3.15")


class _Kind(Enum):
    SUM = auto()  # the sum of all steps' contributions: metrics
    STATISTIC = auto()  # every step adds a change
    SEED = auto()  # the last assignment wins


def share(model: keras.Model) -> None:
    """Makes assignments to the variables of `model` safe for overlapping steps. Call it again for
    new variables."""
    for variable, _ in _held(model):
        if mark(variable):
            _UPSTREAM.patch(variable, "_direct_assign", _assign_in_step(variable))
    for optimizer in list_optimizers(model).values():
        if mark(optimizer.iterations):
            _UPSTREAM.patch(optimizer.iterations, "assign_add", _natively(optimizer.iterations))
    replica_state.separate_streams(model, _number_of_step)


def initialize_averages(model: keras.Model) -> None:
    """Initializes the moving averages of weights with the weights.

    Keras' optimizers do so in their first step, which several workers may run concurrently.
    """
    for optimizer in list_optimizers(model).values():
        averages = getattr(optimizer, "_model_variables_moving_average", None) or ()
        if averages and not int(optimizer.iterations.numpy()):
            for average, weight in zip(averages, optimizer._trainable_variables, strict=True):
                if average is not None:
                    average.assign(weight)


@contextmanager
def step(model: keras.Model, number: tf.Tensor, skipped: SkippedSteps | None) -> Iterator[None]:
    """Uses private values of variables while a step of `model` is traced within the `with` block.

    Args:
        model: A model for which `share` was called.
        number: A random number drawn for this step.
        left_out: Counts steps that are not finite, and makes them change nothing else; None to
            apply all steps.
    """
    natives = [(v, kind, v._value) for v, kind in _held(model)]
    initial = []
    for variable, kind, native in natives:
        zero = kind is _Kind.SUM
        value = tf.zeros(variable.shape, variable.dtype) if zero else native.read_value()
        initial.append(value)
        _UPSTREAM.patch(variable, "_value", value)
    before = _current.step
    _current.step = found = _Step({id(v): native for v, _, native in natives}, number)
    try:
        yield
    finally:
        final = [variable._value for variable, _, _ in natives]
        for variable, _, native in natives:
            _UPSTREAM.patch(variable, "_value", native)
        _current.step = before
    ok = skipped.count(found) if skipped is not None else None
    for (_, kind, native), first, last in zip(natives, initial, final, strict=True):
        if last is first:
            continue
        if kind is _Kind.SEED:
            native.assign(last)
        else:
            change = last - first
            native.assign_add(change if ok is None else tf.where(ok, change, 0))


def record_losses(model: keras.Model) -> None:
    """Lets a `SkippedSteps` see the losses of `model`."""
    if not mark(model, "losses noted"):
        return
    stock = model.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = stock(*args, **kwargs)
        if _current.step is not None and loss is not None and gates.is_here(loss):
            _current.step.finite.append(tf.reduce_all(tf.math.is_finite(loss)))
        return loss

    _UPSTREAM.patch(model, "compute_loss", compute_loss)


class SkippedSteps(gates.Gate):
    """Skips and counts steps that are not finite. Create it in the strategy's scope."""

    def __init__(self) -> None:
        # Total and consecutive number of skipped steps.
        self._counts = touched.exclude_variable(
            tf.Variable(tf.zeros([2], tf.int64), trainable=False)
        )

    def reset(self) -> None:
        self._counts.assign([0, 0])

    def counts(self) -> tuple[int, int]:
        """Returns the total number of skipped steps, and the current consecutive number."""
        total, consecutive = self._counts.numpy()
        return int(total), int(consecutive)

    def count(self, step: _Step) -> tf.Tensor | None:
        """Counts the step if it is not finite. Returns True if it is; None if this is unknown."""
        if not step.finite:
            return None
        ok = step.all_true(step.finite)
        # On the variable's device, and without a condition, this costs one message.
        with tf.device(self._counts.device):
            consecutive = self._counts.read_value()[1]
            # If steps overlap, this may be off by concurrent changes.
            self._counts.assign_add(tf.where(ok, tf.stack([0, -consecutive]), [1, 1]))
        return ok

    def opens(
        self,
        optimizer: keras.optimizers.Optimizer,
        own: Sequence[Any],
        summed: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> tf.Tensor | None:
        step = _current.step
        present = [each for each in summed if each is not None]
        if step is None or not present:
            return None
        finite = [tf.reduce_all(tf.math.is_finite(gates.dense(each))) for each in present]
        step.finite += finite
        return step.all_true([ok for ok in step.finite if gates.is_here(ok)])


@dataclass
class _Step:
    """A step that is being traced."""

    natives: dict[int, Any]
    number: tf.Tensor

    def __post_init__(self) -> None:
        self.finite: list[tf.Tensor] = []
        self._asked: tuple[list[tf.Tensor], tf.Tensor] | None = None

    def all_true(self, finite: list[tf.Tensor]) -> tf.Tensor:
        """Returns True if all are true; always the same tensor for the same arguments, because it
        is sent to other processes."""
        before, ok = self._asked or ([], None)
        if ok is None or [id(each) for each in before] != [id(each) for each in finite]:
            ok = tf.reduce_all(tf.stack(finite))
            self._asked = (list(finite), ok)
        return ok


class _Current:
    step: _Step | None = None  # not per thread: a step's conditions are traced in other threads


_current = _Current()


def _held(model: keras.Model) -> list[tuple[keras.Variable, _Kind]]:
    """Returns the variables of which a step uses private values."""
    seeds = {id(generator.state) for generator in list_seed_generators(model)}
    metrics = {id(variable) for variable in model.metrics_variables}
    found = {id(v): (v, _Kind.SUM) for v in model.metrics_variables}
    for variable in model.non_trainable_variables:
        if id(variable) not in metrics:
            kind = _Kind.SEED if id(variable) in seeds else _Kind.STATISTIC
            found[id(variable)] = (variable, kind)
    for optimizer in list_optimizers(model).values():
        for variable in getattr(optimizer, "_model_variables_moving_average", None) or ():
            found[id(variable)] = (variable, _Kind.STATISTIC)
    return list(found.values())


def _assign_in_step(variable: keras.Variable) -> Callable[[Any], None]:
    stock = variable._direct_assign

    def _direct_assign(value: Any) -> None:
        step = _current.step
        native = None if step is None else step.natives.get(id(variable))
        if native is None:
            stock(value)
            return
        value = tf.cast(value, native.dtype)
        if gates.is_here(variable._value) or tf.executing_eagerly():
            _UPSTREAM.patch(variable, "_value", value)
        else:  # within a condition or loop of the step, whose tensors cannot be used outside
            native.assign_add(value - variable._value)

    return _direct_assign


def _natively(variable: keras.Variable) -> Callable[[Any], Any]:
    def assign_add(value: Any) -> Any:
        native = variable._value
        with tf.device(native.device):  # a constant from another device would cost a message
            native.assign_add(tf.cast(value, native.dtype))
        return variable

    return assign_add


def _number_of_step() -> tf.Tensor | None:
    """Returns the step's random number, which distinguishes its seeds: in overlapping steps,
    workers read the same state of a seed generator."""
    return None if _current.step is None else _current.step.number
