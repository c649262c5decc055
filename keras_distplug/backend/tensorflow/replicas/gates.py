"""What stands between the gradients of a step and the weights, and takes back what else a step did.

Keras 3.10 to 3.15: an optimizer applies whatever it is given, and has no place to ask from (but
`LossScaleOptimizer`, for itself). What a step assigns besides, such as metrics and the statistics
of BatchNormalization, goes through `_direct_assign` of Keras' variables, which is private.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from keras_distplug.backend.tensorflow.replicas import masked
from keras_distplug.backend.tensorflow.replicas.share import current as current_share
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached
from keras_distplug.backend.tensorflow.runtime.current import Current
from keras_distplug.backend.tensorflow.runtime.models import inner_of
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled

_UPSTREAM = Upstream(keras="3.10 to 3.15")


class Gate:
    """Called in the context of a replica, with one gradient or None for each variable."""

    def mark(self, optimizer: keras.optimizers.Optimizer, own: Sequence[Any]) -> Sequence[Any]:
        """The gradients of this replica as the others shall get them."""
        return own

    def received(
        self, optimizer: keras.optimizers.Optimizer, summed: Sequence[Any]
    ) -> Sequence[Any]:
        """The gradients of all replicas together as the optimizer shall get them."""
        return summed

    def opens(
        self,
        optimizer: keras.optimizers.Optimizer,
        own: Sequence[Any],
        summed: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> tf.Tensor | None:
        """Whether `summed`, those of all replicas together, are applied to `variables`; None: as if
        there were no gate."""
        return None


def dense(gradient: Any) -> tf.Tensor:
    """The values of a gradient, some of which say only what is not 0."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


@dataclass(frozen=True)
class _Gate:
    """That of an optimizer."""

    gate: Gate | None


@dataclass(frozen=True)
class _IsNoted:
    """Whether the assignments to a variable are noted."""

    value: bool


def _gate_of(optimizer: keras.optimizers.Optimizer) -> Gate | None:
    found = attached(optimizer, _Gate)
    return None if found is None else found.gate


def put_before(optimizer: keras.optimizers.Optimizer, gate: Gate | None) -> None:
    """Makes `gate` that of an optimizer, or takes it away."""
    attach(optimizer, _Gate(gate))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def marked(optimizer: keras.optimizers.Optimizer, own: Sequence[Any]) -> Sequence[Any]:
    gate = _gate_of(optimizer)
    return own if gate is None else gate.mark(optimizer, own)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def apply(
    optimizer: keras.optimizers.Optimizer,
    stock: Callable[[Any, Any], Any],
    own: Sequence[Any],
    summed: Sequence[Any],
    variables: Any,
) -> Any:
    """`stock(summed, variables)` if the gate of `optimizer` opens. No replica applies alone."""
    gate = _gate_of(optimizer)
    context = tf.distribute.get_replica_context()
    if gate is None or context is None:
        return stock(summed, variables)
    if variables is not None:
        variables = list(variables)
        _build(optimizer, variables)
    trained = inner_of(optimizer)._trainable_variables if variables is None else variables
    summed = gate.received(optimizer, summed)
    opens = gate.opens(optimizer, own, summed, trained)
    if opens is None:
        return stock(summed, variables)
    if is_scheduled(tf.distribute.get_strategy()) and masked.knows(optimizer):
        with masked.changed_only_if(opens, [*optimizer.variables, *trained]):
            return stock(summed, variables)

    def update(present: Sequence[Any]) -> None:
        given = iter(present)
        grads = [None if gradient is None else next(given) for gradient in summed]
        with _noting_in.at(None):
            stock(grads, variables)

    present = [gradient for gradient in summed if gradient is not None]
    cond_over_replicas(context, opens, update, lambda _: None, present)
    return None


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    """As `apply` would, which cannot do it within a condition."""
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True


def cond_over_replicas(
    context: tf.distribute.ReplicaContext,
    condition: tf.Tensor,
    if_true: Callable[[Any], None],
    if_false: Callable[[Any], None],
    arguments: Any,
) -> None:
    """Runs one of two functions on all replicas, by the first one's `condition`."""

    def merged(strategy: tf.distribute.Strategy, condition: Any, arguments: Any) -> None:
        def on_all(function: Callable[[Any], None]) -> Callable[[], None]:
            return lambda: strategy.extended.call_for_each_replica(function, args=(arguments,))

        first = strategy.experimental_local_results(condition)[0]
        tf.cond(first, on_all(if_true), on_all(if_false))

    context.merge_call(merged, args=(condition, arguments))


def of_first(
    context: tf.distribute.ReplicaContext, function: Callable[[Any], tf.Tensor], arguments: Any
) -> tf.Tensor:
    """What `function` makes of the `arguments` of one replica of this process, for all of them.

    Where all have the same arguments, it is computed once instead of by each.
    """

    def merged(strategy: tf.distribute.Strategy, arguments: Sequence[Any]) -> tf.Tensor:
        firsts = [strategy.experimental_local_results(each)[0] for each in arguments]
        with tf.device(firsts[0].device):
            return function(firsts)

    found: tf.Tensor = context.merge_call(merged, args=(arguments,))
    return found


class Assigned:
    """What one replica has assigned in a step, and its values before."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, tf.Tensor]] = {}

    def note(self, variable: keras.Variable) -> None:
        if id(variable) not in self._before:
            own = _own(variable)
            self._before[id(variable)] = (own, own.read_value())

    def keep_if(self, condition: tf.Tensor) -> None:
        """Puts the values back where `condition` is false."""
        kept = [(own, before) for own, before in self._before.values() if is_here(before)]

        def put_back() -> None:
            for own, before in kept:
                own.assign(before)

        # Where all is well, a condition costs less than assignments.
        if kept:
            tf.cond(condition, lambda: None, put_back)


def is_here(tensor: tf.Tensor) -> bool:
    """Whether it is of the function that is being traced.

    One that the user made a `tf.function`, within a step, may be traced once and called in others:
    what it took from this step would be out of scope there.
    """
    here: bool = tf.executing_eagerly() or tensor.graph is tf.compat.v1.get_default_graph()
    return here


_noting_in: Current[Assigned] = Current()


@contextmanager
def assignments_noted() -> Iterator[Assigned]:
    """Notes what variables are given, but for those that optimizers give to what they train."""
    assigned = Assigned()
    new_ones = _new_variables_noted() if current_share() is None else nullcontext()
    with _noting_in.at(assigned), new_ones:
        yield assigned


def note_assignments(variables: Sequence[keras.Variable]) -> None:
    """Makes the assignments to `variables` such as are noted."""
    for variable in variables:
        if attached(variable, _IsNoted) is None:
            attach(variable, _IsNoted(True))
            _UPSTREAM.patch(variable, "_direct_assign", _noting(variable, variable._direct_assign))


def never_note_assignments(variables: Sequence[keras.Variable]) -> None:
    for variable in variables:
        attach(variable, _IsNoted(False))


def _noting(variable: keras.Variable, stock: Callable[[Any], None]) -> Callable[[Any], None]:
    def _direct_assign(value: Any) -> None:
        noted = attached(variable, _IsNoted)
        if _noting_in.now is not None and (noted is None or noted.value):
            _noting_in.now.note(variable)
        stock(value)

    return _direct_assign


@contextmanager
def _new_variables_noted() -> Iterator[None]:
    """Of one device, Keras makes metrics, and layers that nobody has built, in the first step."""
    stock = backend.Variable._direct_assign

    def _direct_assign(variable: keras.Variable, value: Any) -> None:
        _noting(variable, functools.partial(stock, variable))(value)

    with _UPSTREAM.patched(backend.Variable, "_direct_assign", _direct_assign):
        yield


def _own(variable: keras.Variable) -> tf.Variable:
    """This replica's own part of a variable, or the central one that all share."""
    value = variable._value
    if isinstance(value, tf.distribute.DistributedValues):
        return value._get()
    return value.get() if hasattr(value, "get") else value
