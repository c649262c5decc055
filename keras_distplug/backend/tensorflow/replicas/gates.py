"""Gates between gradients and weights, which can also revert the other assignments of a step.

Keras 3.10 to 3.15: an optimizer applies every update, and has no hook to prevent one (except in
`LossScaleOptimizer`, for its own use). The other assignments of a step, such as to metrics and the
statistics of BatchNormalization, go through `_direct_assign` of Keras' variables, which is private.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from keras_distplug.backend.tensorflow.replicas import ahead, masked, products
from keras_distplug.backend.tensorflow.replicas.share import current as current_share
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached
from keras_distplug.backend.tensorflow.runtime.current import Current
from keras_distplug.backend.tensorflow.runtime.models import get_inner_optimizer
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled

_UPSTREAM = Upstream(keras="3.10 to 3.15")


class Gate:
    """Decides about updates. It is called in the context of a replica, with one gradient or None
    per variable."""

    def mark(self, optimizer: keras.optimizers.Optimizer, own: Sequence[Any]) -> Sequence[Any]:
        """Returns this replica's gradients as they should be sent to the others."""
        return own

    def received(
        self, optimizer: keras.optimizers.Optimizer, summed: Sequence[Any]
    ) -> Sequence[Any]:
        """Returns the sum of all replicas' gradients as it should be given to the optimizer."""
        return summed

    def opens(
        self,
        optimizer: keras.optimizers.Optimizer,
        own: Sequence[Any],
        summed: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> tf.Tensor | None:
        """Returns True if `summed`, the gradients of all replicas together, should be applied to
        `variables`; None to apply them unconditionally."""
        return None

    def reverts(self) -> bool:
        """True if the update may be applied in any case, because nothing uses the new values before
        the end of the step, which restores what `recorded_assignments` has recorded."""
        return False


def dense(gradient: Any) -> tf.Tensor:
    """Returns the values of a gradient; for a sparse one, only those that it contains."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


@dataclass(frozen=True)
class _Gate:
    """The gate attached to an optimizer."""

    gate: Gate | None


@dataclass(frozen=True)
class _IsRecorded:
    """Attached to a variable: True if its assignments are recorded."""

    value: bool


def _get_gate(optimizer: keras.optimizers.Optimizer) -> Gate | None:
    found = attached(optimizer, _Gate)
    return None if found is None else found.gate


def set_gate(optimizer: keras.optimizers.Optimizer, gate: Gate | None) -> None:
    """Attaches `gate` to an optimizer; None removes it."""
    attach(optimizer, _Gate(gate))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def marked(optimizer: keras.optimizers.Optimizer, own: Sequence[Any]) -> Sequence[Any]:
    gate = _get_gate(optimizer)
    return own if gate is None else gate.mark(optimizer, own)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def apply(
    optimizer: keras.optimizers.Optimizer,
    stock: Callable[[Any, Any], Any],
    own: Sequence[Any],
    summed: Sequence[Any],
    variables: Any,
) -> Any:
    """Calls `stock(summed, variables)` on all replicas if the gate of `optimizer` opens."""
    gate = _get_gate(optimizer)
    context = tf.distribute.get_replica_context()
    if gate is None or context is None:
        return stock(summed, variables)
    if variables is not None:
        variables = list(variables)
        _build(optimizer, variables)
    trained = (
        get_inner_optimizer(optimizer)._trainable_variables if variables is None else variables
    )
    summed = gate.received(optimizer, summed)
    own_copies, copies = products.copies(optimizer, own), products.copies(optimizer, summed)
    opens = gate.opens(optimizer, own_copies, copies, trained)
    if opens is None:
        return stock(summed, variables)
    if is_scheduled(tf.distribute.get_strategy()) and masked.knows(optimizer):
        with masked.masked_updates(opens, [*optimizer.variables, *trained]):
            return stock(summed, variables)

    def update(present: Sequence[Any]) -> None:
        given = iter(present)
        grads = [None if gradient is None else next(given) for gradient in summed]
        with _recording.at(None):
            stock(grads, variables)

    def update_all() -> None:
        with _recording.at(None):
            stock(summed, variables)

    if context.num_replicas_in_sync == 1:
        recording = _recording.now
        keep = recording.keep if recording is not None and gate.reverts() else None
        if ahead.apply_if(opens, optimizer, trained, summed, update_all, keep):
            return None
    present = [gradient for gradient in summed if gradient is not None]
    cond_over_replicas(context, opens, update, lambda _: None, present)
    return None


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Builds the optimizer like `apply` would, which is not possible within a condition."""
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
    """Runs one of two functions on all replicas, depending on the first replica's `condition`."""

    def merged(strategy: tf.distribute.Strategy, condition: Any, arguments: Any) -> None:
        def on_all(function: Callable[[Any], None]) -> Callable[[], None]:
            return lambda: strategy.extended.call_for_each_replica(function, args=(arguments,))

        first = strategy.experimental_local_results(condition)[0]
        tf.cond(first, on_all(if_true), on_all(if_false))

    context.merge_call(merged, args=(condition, arguments))


def compute_once(
    context: tf.distribute.ReplicaContext, function: Callable[[Any], tf.Tensor], arguments: Any
) -> tf.Tensor:
    """Returns the result of `function` for the first replica in this process, on all of them.

    If all replicas have the same arguments, this computes the result only once.
    """

    def merged(strategy: tf.distribute.Strategy, arguments: Sequence[Any]) -> tf.Tensor:
        firsts = [strategy.experimental_local_results(each)[0] for each in arguments]
        with tf.device(firsts[0].device):
            return function(firsts)

    found: tf.Tensor = context.merge_call(merged, args=(arguments,))
    return found


class Assigned:
    """The variables that one replica has assigned in a step, with their previous values."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, tf.Tensor]] = {}

    def note(self, variable: keras.Variable) -> None:
        if id(variable) not in self._before:
            own = _local_part(variable)
            self._before[id(variable)] = (own, own.read_value())

    def keep(self, native: tf.Variable, previous: tf.Tensor) -> None:
        """Records an assignment that an update makes."""
        self._before[id(native)] = (native, previous)

    def list_previous(self) -> list[tuple[Any, tf.Tensor]]:
        """Returns variables and their previous values, if these belong to the traced function.

        A variable that both a layer and the update assign is returned twice, the newest value
        first: assigning all of them in this order restores the oldest.
        """
        every = [(own, before) for own, before in self._before.values() if is_here(before)]
        return every[::-1]


def is_here(tensor: tf.Tensor) -> bool:
    """True if `tensor` belongs to the function that is being traced.

    A user's `tf.function` within a step may be traced once and called in other steps, where tensors
    captured from this step would be out of scope.
    """
    here: bool = tf.executing_eagerly() or tensor.graph is tf.compat.v1.get_default_graph()
    return here


_recording: Current[Assigned] = Current()


@contextmanager
def recorded_assignments() -> Iterator[Assigned]:
    """Records assignments to variables, except those of optimizers to the variables they train.

    On a single device, these are all variables: Keras creates those of metrics and of unbuilt
    layers in the first step. With replicas, `record_assignments` enables them.
    """
    assigned = Assigned()
    _record_on_one_device()
    with _recording.at(assigned):
        yield assigned


def record_assignments(variables: Sequence[keras.Variable]) -> None:
    """Enables the recording of assignments that replicas make to `variables`."""
    for variable in variables:
        if attached(variable, _IsRecorded) is None:
            attach(variable, _IsRecorded(True))
            _UPSTREAM.patch(
                variable, "_direct_assign", _recording_assign(variable, variable._direct_assign)
            )


def never_record_assignments(variables: Sequence[keras.Variable]) -> None:
    for variable in variables:
        attach(variable, _IsRecorded(False))


def _recording_assign(
    variable: keras.Variable, stock: Callable[[Any], None]
) -> Callable[[Any], None]:
    def _direct_assign(value: Any) -> None:
        _note(variable)
        stock(value)

    return _direct_assign


@functools.cache
def _record_on_one_device() -> None:
    # For the whole life of the process: several threads may trace steps.
    stock = backend.Variable._direct_assign

    def _direct_assign(variable: keras.Variable, value: Any) -> None:
        if current_share() is None:
            _note(variable)
        stock(variable, value)

    _UPSTREAM.patch(backend.Variable, "_direct_assign", _direct_assign)


def _note(variable: keras.Variable) -> None:
    if _recording.now is not None:
        flag = attached(variable, _IsRecorded)
        if flag is None or flag.value:
            _recording.now.note(variable)


def _local_part(variable: keras.Variable) -> tf.Variable:
    """Returns this replica's part of a variable, or the central one that all replicas share."""
    value = variable._value
    if isinstance(value, tf.distribute.DistributedValues):
        return value._get()
    return value.get() if hasattr(value, "get") else value
