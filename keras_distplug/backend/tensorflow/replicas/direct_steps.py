"""Steps on one device that return their logs without an optional.

Keras 3.10 to 3.15: the compiled function of an iterator returns the logs in a
`tf.experimental.Optional`, and two more operations per step take them out again. This is a quarter
of the time of a one-millisecond step on a CPU. Only a function of several steps
(`steps_per_execution`) needs it, because it may run none; the function of one step raises
`OutOfRangeError` at the end of the data. Keras 3.16 has another loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.data.util import nest

from keras_distplug.backend.tensorflow.replicas.steps import counted_alone

_ON_DATA, _ON_ITERATOR = "one_step_on_data", "multi_step_on_iterator"
_Function = Callable[[Any], Any]


def maker(model: keras.Model) -> Callable[[_Function], _Function]:
    """Returns a replacement for the `_make_function` of `model`, which Keras makes the functions of
    `fit` and `evaluate` with."""
    stock = model._make_function

    def _make_function(step_function: _Function) -> _Function:
        function: _Function = stock(step_function)
        known = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        if model.run_eagerly or not {_ON_DATA, _ON_ITERATOR} <= known.keys():
            return function
        step = known[_ON_DATA]

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def next_step(iterator: Any) -> Any:
            # In an optional, lists would become tensors, too.
            return nest.map_structure(_without_list, step(iterator.get_next()))

        compiled = tf.function(counted_alone(next_step), reduce_retracing=True)
        chosen: list[_Function] = []

        def direct(iterator: Any) -> Any:
            if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
                return function(iterator)
            if not chosen:  # Keras reads the number of steps only when it traces its function
                chosen.append(compiled if model.steps_per_execution == 1 else function)
            return chosen[0](iterator)

        return direct

    return _make_function


def _without_list(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, list) else value
