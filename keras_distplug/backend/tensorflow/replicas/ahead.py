"""Updates whose results are computed before it is known if they will be applied.

A condition around an update waits for all gradients. Without one, TensorFlow updates the last
layers while it computes the gradients of the first, which saves 3% of a step of a perceptron with
2.6 M weights on two cores. Even the condition around the assignments alone takes 4% of a step of
1.5 ms. It is not needed if the end of the step can give the variables their previous values back.
For a moment, new values exist next to the old ones, which takes memory. Measured on CPUs only, and
only used there.

The names with which TensorFlow 2.18 to 2.21 reads variables are private.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas import masked, products
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(tensorflow="2.18 to 2.21")

_WORTH_BYTES = 4 * 2**20  # of smaller weights, the additional operations cost more than is gained
_MOST_BYTES = 256 * 2**20  # of larger ones, a second copy might not fit into memory
_SCATTERS = ("scatter_update", "scatter_add", "scatter_sub")


class _NotPossibleError(Exception):
    """The optimizer updates its variables in another way."""


def apply_if(
    condition: tf.Tensor,
    optimizer: keras.optimizers.Optimizer,
    trained: Sequence[keras.Variable],
    gradients: Sequence[Any],
    update: Callable[[], None],
    keep: Callable[[tf.Variable, tf.Tensor], None] | None = None,
) -> bool:
    """Traces an update that is computed in any case, but only applied if `condition` is true.

    Args:
        condition: A boolean scalar.
        optimizer: The optimizer that `update` calls.
        trained: The variables that it trains.
        gradients: Their gradients.
        update: Updates the variables.
        keep: Called with every variable and its previous value; the end of the step must assign
            that if `condition` is false. The update is applied in any case then. Defaults to
            `None`: nothing is assigned if `condition` is false.

    Returns:
        False if this is not possible, or not worth it. Nothing was changed then.
    """
    natives = [variable._value for variable in (*optimizer.variables, *trained)]
    # Without a condition, it is worth it for any size; and the bits of products depend on it.
    always = keep is not None or products.are_reordered(optimizer, gradients)
    if not _is_suitable(optimizer, natives, trained, gradients, 0 if always else _WORTH_BYTES):
        return False
    new = _NewValues(natives)
    try:
        new.trace(update)
    except _NotPossibleError:
        return False
    if keep is None:
        tf.cond(condition, new.assign, lambda: None)
    else:
        for native, previous in new.list_previous():
            keep(native, previous)
        new.assign()
    return True


def _is_suitable(
    optimizer: keras.optimizers.Optimizer,
    natives: Sequence[Any],
    trained: Sequence[keras.Variable],
    gradients: Sequence[Any],
    least_bytes: int,
) -> bool:
    if tf.executing_eagerly() or not masked.knows(optimizer) or _has_conditions(optimizer):
        return False
    if not all(isinstance(each, tf.Tensor) for each in gradients if each is not None):
        return False
    if any(isinstance(each, tf.distribute.DistributedValues) for each in natives):
        return False
    if not all(isinstance(each, tf.Variable) and "CPU" in each.device for each in natives):
        return False
    return least_bytes <= sum(map(_count_bytes, trained)) <= _MOST_BYTES


def _has_conditions(optimizer: Any) -> bool:
    """True if the optimizer itself decides in every step what it updates."""
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    overwrites = optimizer.use_ema and optimizer.ema_overwrite_frequency
    return bool(is_scaling or optimizer.gradient_accumulation_steps or overwrites)


def _count_bytes(variable: keras.Variable) -> int:
    native: tf.Variable = variable._value
    return int(native.shape.num_elements() or 0) * int(native.dtype.size)


class _NewValues:
    """The values that an update gives to variables, which keep their old values."""

    def __init__(self, natives: Sequence[tf.Variable]) -> None:
        self._natives = list({id(each): each for each in natives}.values())
        self._graph = tf.compat.v1.get_default_graph()
        self._assigned: list[_Traced] = []

    def trace(self, update: Callable[[], None]) -> None:
        """Calls `update`, whose assignments then only change what it reads itself."""
        with ExitStack() as stack:
            traced = [_Traced(each, self._graph) for each in self._natives]
            for one in traced:
                for name, method in one.methods().items():
                    stack.enter_context(_UPSTREAM.patched(one.native, name, method))
            update()
        self._assigned = [one for one in traced if one.new is not None]

    def assign(self) -> None:
        for one in self._assigned:
            one.native.assign(one.new, read_value=False)

    def list_previous(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Returns the variables that get a new value, with their previous one."""
        return [(one.native, one.previous) for one in self._assigned]


class _Traced:
    """One variable while an update is traced."""

    def __init__(self, native: tf.Variable, graph: Any) -> None:
        self.native, self._graph = native, graph
        self._read = native._read_variable_op
        self.new: tf.Tensor | None = None  # None if it is not assigned

    @functools.cached_property
    def previous(self) -> tf.Tensor:
        return self._read()

    @property
    def value(self) -> tf.Tensor:
        self._require_same_graph()
        return self.previous if self.new is None else self.new

    def methods(self) -> dict[str, Callable[..., Any]]:
        return {
            "assign": lambda value, *_, **__: self._set(self._cast(value)),
            "assign_add": lambda value, *_, **__: self._set(self.value + self._cast(value)),
            "assign_sub": lambda value, *_, **__: self._set(self.value - self._cast(value)),
            "_read_variable_op": lambda *_, **__: self.value,
            **dict.fromkeys(_SCATTERS, _refuse),
        }

    def _cast(self, value: Any) -> tf.Tensor:
        return tf.cast(tf.convert_to_tensor(value), self.native.dtype)

    def _set(self, value: tf.Tensor) -> None:
        self._require_same_graph()
        self.new = value

    def _require_same_graph(self) -> None:
        # A value of a branch or a loop does not exist outside.
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise _NotPossibleError


def _refuse(*_: Any, **__: Any) -> None:
    raise _NotPossibleError
