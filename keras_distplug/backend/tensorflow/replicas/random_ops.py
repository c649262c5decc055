"""Random ops of a step, whose state nobody can read, with their state in a variable.

TensorFlow 2.18 to 2.21. The kernels of `tf.random.normal` and its like draw from Philox with the
key `seed` and the counter `(0, seed2)`; each run moves the counter by 256 for each number that it
gives (`GuardedPhiloxRandom`). Stateless ops with that key and counter give the same bits, so a
variable that counts makes twins of them that can be saved. This is done in the graph of the step
itself, and in its conditions and loops: there every op has one kernel. TensorFlow may give a
function that a step calls twice two kernels with the same numbers.
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

_NUMBERS_APART = 256  # how far a kernel moves its counter for one number
_PHILOX = 1
_VECTORIZED = "tensorflow/python/ops/parallel_for/"
_WITHIN = tuple(
    getattr(control_flow_v2_func_graphs, f"{name}FuncGraph")
    for name in ("CondBranch", "WhileCond", "WhileBody")
)


@dataclass(frozen=True)
class _Draws:
    """How far one op has drawn: its position, and the two seeds that its stream has."""

    state: ResourceVariable
    begun_at: tuple[int, ...]

    @property
    def now(self) -> tuple[int, ...]:
        return tuple(map(int, self.state.numpy()))


class Draws:
    """How far the random ops of a model's steps have drawn, by step, shapes of its batch and
    number.

    Args:
        is_shared: Whether several traces of a step are in use, and go on from each other.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        _all_draws.add(self)
        self._ops: dict[str, _Draws] = {}
        self._waiting: dict[str, tuple[int, ...]] = {}  # of those that are not traced yet

    def has(self, handle: tf.Tensor) -> bool:
        """Is `handle` that of a state?"""
        return any(each.state.handle is handle for each in self._ops.values())

    def states(self) -> dict[str, tuple[int, ...]]:
        return {**self._waiting, **{name: each.now for name, each in self._ops.items()}}

    def go_on_from(self, states: Mapping[str, Sequence[int]]) -> None:
        """Puts back what `states` gave, before the steps run."""
        self._waiting = {name: tuple(state) for name, state in states.items()}
        for name in self._ops.keys() & states.keys():
            self._assign(name, self._waiting.pop(name))

    def keep(self) -> None:
        """To be called when the package has a step traced anew, which plain Keras would not."""
        self._waiting = self.states()

    def begin_anew(self) -> None:
        """What TensorFlow's kernels do when it forgets them."""
        self._waiting = {}
        with tf.init_scope():
            for name, each in list(self._ops.items()):
                self._assign(name, (0, *each.now[1:]))

    def _assign(self, name: str, state: tuple[int, ...]) -> None:
        self._ops[name].state.assign(state)
        self._ops[name] = _Draws(self._ops[name].state, state)

    def begin(self, name: str, seeds: tuple[int, int]) -> ResourceVariable:
        """The state of an op that is traced. It begins anew, as its kernel would, unless another
        trace of it has not run."""
        before = self._ops.get(name)
        if before is not None and self._is_shared:
            return before.state
        begun_at = self._waiting.pop(name, (0, *seeds))
        with tf.init_scope(), tf.device("CPU:0"):
            if before is not None and before.now == before.begun_at:
                begun_at = before.begun_at
            state = ResourceVariable(begun_at, trainable=False, dtype=tf.int64)
        self._ops[name] = _Draws(state, begun_at)
        return state


@contextmanager
def counted(draws: Draws, step: str, data: Any) -> Iterator[None]:
    """While a step of `data` is traced, has its random ops draw from positions that are known."""
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
        """Is an op that is made now one of the step, so that it has one kernel?"""
        graph = tf.compat.v1.get_default_graph()
        while graph is not self.graph and isinstance(graph, _WITHIN):
            graph = graph.outer_graph
        # There, TensorFlow makes an op for many numbers of one for one.
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
# They have to live as long as the graphs that use them.
_states_in: weakref.WeakKeyDictionary[tf.Graph, list[ResourceVariable]] = (
    weakref.WeakKeyDictionary()
)


def install() -> None:
    """Puts the twins into TensorFlow's module. They are stock ops outside of `counted`."""
    if is_marked(gen_random_ops.random_uniform_int):
        return
    twins = {name: _of_floats(getattr(gen_random_ops, name), _FLOATS[name]) for name in _FLOATS}
    twins["random_uniform_int"] = _of_integers(gen_random_ops.random_uniform_int)
    for name, twin in twins.items():
        mark(twin)
        _UPSTREAM.patch(gen_random_ops, name, twin)
    # `set_random_seed` and `clear_session` make TensorFlow forget its kernels.
    for name in ("_set_global_seed", "clear_kernel_cache"):
        _UPSTREAM.patch(Context, name, _forgetting(getattr(Context, name)))


def _forgetting(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forget(context: Any, *args: Any) -> Any:
        found = stock(context, *args)
        for draws in list(_all_draws):
            draws.begin_anew()
        return found

    return forget


_FLOATS = {
    "random_standard_normal": tf.raw_ops.StatelessRandomNormalV2,
    "random_uniform": tf.raw_ops.StatelessRandomUniformV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}


def _of_floats(stock: Callable[..., Any], stateless: Callable[..., Any]) -> Callable[..., Any]:
    def twin(shape: Any, dtype: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> Any:
        given = _drawn(shape, seed, seed2)
        if given is None:
            return stock(shape, dtype, seed=seed, seed2=seed2, name=name)
        return stateless(**given, dtype=dtype, name=name)

    return twin


def _of_integers(stock: Callable[..., Any]) -> Callable[..., Any]:
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
    """What a stateless op takes to draw what a kernel with these seeds would; None where the kernel
    shall draw."""
    step = _current.now
    if step is None or not (seed or seed2) or not step.is_here():
        return None
    state = step.state((seed, seed2))
    position, key, high = tf.unstack(tf.bitcast(state.read_value(), tf.uint64))
    shape = tf.convert_to_tensor(shape, dtype_hint=tf.int32)  # of [], too
    numbers = tf.reduce_prod(tf.cast(shape, tf.int64))
    state.assign_add(tf.stack([numbers * _NUMBERS_APART, 0, 0]), read_value=False)
    return {"shape": shape, "key": key[None], "counter": tf.stack([position, high]), "alg": _PHILOX}
