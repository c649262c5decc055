"""Replaces a step's random ops, whose state is unreadable, by twins with state in a variable.

TensorFlow 2.18 to 2.21. The kernels of `tf.random.normal` and similar ops draw from Philox with the
key `seed` and the counter `(0, seed2)`; every run advances the counter by 256 per number drawn
(`GuardedPhiloxRandom`). Stateless ops with the same key and counter give the same bits, so a twin
that keeps the counter in a variable can be saved. Ops are replaced in the graph of the step itself
and in its conditions and loops, where every op has one kernel. In a function that a step calls
twice, an op may have two kernels that draw the same numbers.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager.context import Context
from tensorflow.python.ops import control_flow_v2_func_graphs, gen_random_ops
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from keras_distplug.backend.tensorflow.runtime.attached import is_marked, mark
from keras_distplug.backend.tensorflow.runtime.current import Current
from keras_distplug.backend.tensorflow.runtime.frames import callers
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(tensorflow="2.18 to 2.21")

_NUMBERS_APART = 256  # by which a kernel advances its counter per number
_PHILOX = 1
_VECTORIZED = "tensorflow/python/ops/parallel_for/"
_WITHIN = tuple(
    getattr(control_flow_v2_func_graphs, f"{name}FuncGraph")
    for name in ("CondBranch", "WhileCond", "WhileBody")
)


@dataclass(frozen=True)
class _Draws:
    """The position of one op in its random stream, and the stream's two seeds."""

    state: ResourceVariable
    start: tuple[int, ...]

    @property
    def now(self) -> tuple[int, ...]:
        return tuple(map(int, self.state.numpy()))


class Draws:
    """The positions of the random ops of a model's steps, by step, shapes of the batch and index.

    Args:
        is_shared: True if several traces of a step are in use and continue each other's streams.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        _all_draws.add(self)
        self._ops: dict[str, _Draws] = {}
        self._waiting: dict[str, tuple[int, ...]] = {}  # for ops that are not traced yet

    def has(self, handle: tf.Tensor) -> bool:
        """True if `handle` belongs to one of the state variables."""
        return any(each.state.handle is handle for each in self._ops.values())

    def states(self) -> dict[str, tuple[int, ...]]:
        return {**self._waiting, **{name: each.now for name, each in self._ops.items()}}

    def continue_streams(self, states: Mapping[str, Sequence[int]]) -> None:
        """Restores a result of `states`. Call it before the steps run."""
        self._waiting = {name: tuple(state) for name, state in states.items()}
        for name in self._ops.keys() & states.keys():
            self._assign(name, self._waiting.pop(name))

    def keep(self) -> None:
        """Keeps the positions if a step is traced again. Call it if the package, not Keras, causes
        this."""
        self._waiting = self.states()

    def restart_streams(self) -> None:
        """Restarts all streams, as TensorFlow's kernels do when the kernel cache is cleared."""
        self._waiting = {}
        with tf.init_scope():
            for name, each in list(self._ops.items()):
                self._assign(name, (0, *each.now[1:]))

    def _assign(self, name: str, state: tuple[int, ...]) -> None:
        self._ops[name].state.assign(state)
        self._ops[name] = _Draws(self._ops[name].state, state)

    def begin(self, name: str, seeds: tuple[int, int]) -> ResourceVariable:
        """Returns the state variable of an op that is being traced. It starts from the seed, as
        a new kernel would, unless an earlier trace of the op has not run yet."""
        before = self._ops.get(name)
        if before is not None and self._is_shared:
            return before.state
        start = self._waiting.pop(name, (0, *seeds))
        with tf.init_scope(), tf.device("CPU:0"):
            if before is not None and before.now == before.start:
                start = before.start
            state = ResourceVariable(start, trainable=False, dtype=tf.int64)
        self._ops[name] = _Draws(state, start)
        return state


@contextmanager
def counted(draws: Draws, step: str, data: Any) -> Iterator[None]:
    """Replaces random ops by their twins while a step of `data` is traced."""
    install()
    shapes = ",".join(
        f"{value.dtype.name}{value.shape}"
        for value in keras.tree.flatten(data)
        if isinstance(value, tf.Tensor)
    )
    with _current.at(_Step(draws, f"{step}({shapes})", tf.compat.v1.get_default_graph())):
        yield


@dataclass(frozen=True)
class _Step:
    draws: Draws
    name: str
    graph: tf.Graph

    def is_here(self) -> bool:
        """True if an op created now belongs to the step itself, so that it has one kernel."""
        graph = tf.compat.v1.get_default_graph()
        while graph is not self.graph and isinstance(graph, _WITHIN):
            graph = graph.outer_graph
        # In vectorized code, TensorFlow turns an op for one number into one for many.
        return graph is self.graph and not any(
            _VECTORIZED in frame.f_code.co_filename for frame in callers(sys._getframe())
        )

    def state(self, seeds: tuple[int, int]) -> ResourceVariable:
        states = _states_in.setdefault(self.graph, [])
        state = self.draws.begin(f"{self.name} {len(states)}", seeds)
        states.append(state)
        return state


_current: Current[_Step] = Current()
_all_draws: weakref.WeakSet[Draws] = weakref.WeakSet()
# State variables must live as long as the graphs that use them.
_states_in: weakref.WeakKeyDictionary[tf.Graph, list[ResourceVariable]] = (
    weakref.WeakKeyDictionary()
)


def install() -> None:
    """Puts the twins into TensorFlow's module. Outside `counted`, they behave like stock ops."""
    if is_marked(gen_random_ops.random_uniform_int):
        return
    twins = {
        name: _make_float_twin(getattr(gen_random_ops, name), _FLOATS[name]) for name in _FLOATS
    }
    twins["random_uniform_int"] = _make_integer_twin(gen_random_ops.random_uniform_int)
    for name, twin in twins.items():
        mark(twin)
        _UPSTREAM.patch(gen_random_ops, name, twin)
    # `set_random_seed` and `clear_session` clear TensorFlow's kernel cache.
    for name in ("_set_global_seed", "clear_kernel_cache"):
        _UPSTREAM.patch(Context, name, _forgetting(getattr(Context, name)))


def _forgetting(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forget(context: Any, *args: Any) -> Any:
        found = stock(context, *args)
        for draws in list(_all_draws):
            draws.restart_streams()
        return found

    return forget


_FLOATS = {
    "random_standard_normal": tf.raw_ops.StatelessRandomNormalV2,
    "random_uniform": tf.raw_ops.StatelessRandomUniformV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}


def _make_float_twin(
    stock: Callable[..., Any], stateless: Callable[..., Any]
) -> Callable[..., Any]:
    def twin(shape: Any, dtype: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> Any:
        given = _drawn(shape, seed, seed2)
        if given is None:
            return stock(shape, dtype, seed=seed, seed2=seed2, name=name)
        return stateless(**given, dtype=dtype, name=name)

    return twin


def _make_integer_twin(stock: Callable[..., Any]) -> Callable[..., Any]:
    def twin(
        shape: Any, minval: Any, maxval: Any, seed: int = 0, seed2: int = 0, name: str | None = None
    ) -> Any:
        given = _drawn(shape, seed, seed2)
        if given is None:
            return stock(shape, minval, maxval, seed=seed, seed2=seed2, name=name)
        return tf.raw_ops.StatelessRandomUniformIntV2(
            **given, minval=minval, maxval=maxval, name=name
        )

    return twin


def _drawn(shape: Any, seed: int, seed2: int) -> dict[str, Any] | None:
    """Returns the arguments with which a stateless op draws the same numbers as a kernel with these
    seeds; None to use the kernel."""
    step = _current.now
    if step is None or not (seed or seed2) or not step.is_here():
        return None
    state = step.state((seed, seed2))
    position, key, high = tf.unstack(tf.bitcast(state.read_value(), tf.uint64))
    shape = tf.convert_to_tensor(shape, dtype_hint=tf.int32)  # the hint is for []
    numbers = tf.reduce_prod(tf.cast(shape, tf.int64))
    state.assign_add(tf.stack([numbers * _NUMBERS_APART, 0, 0]), read_value=False)
    return {"shape": shape, "key": key[None], "counter": tf.stack([position, high]), "alg": _PHILOX}
