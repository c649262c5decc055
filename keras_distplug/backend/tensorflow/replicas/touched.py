"""Records the variables that a step uses, and its ops that keep a random state.

TensorFlow 2.18 to 2.21. A graph's captures are public, but no public function says which of
them are variables, nor to get the graphs of functions that a step calls.
"""

from __future__ import annotations

import enum
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from keras_distplug.backend.tensorflow.replicas import python_draws, random_ops
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached
from keras_distplug.backend.tensorflow.runtime.frames import NOT_THE_USERS, callers
from keras_distplug.backend.tensorflow.runtime.workers import has_several_replicas

OnData = Callable[[Any], Any]
_Handles = dict[int, tuple[tf.Tensor, str | None]]  # by `id`, each with the place of its use

_excluded: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# The kernels of these ops keep private counters of the numbers they have drawn.
_KEEPS_RANDOM_STATE = re.compile(
    r"Random(StandardNormal|Uniform|UniformInt|Shuffle|Gamma|PoissonV2|Poisson|Crop)"
    r"|(Parameterized)?TruncatedNormal|Multinomial|SampleDistortedBoundingBox(V2)?"
    r"|.*CandidateSampler"
)


class Stage(enum.Enum):
    """The stage of a step: traced but not yet run or, for an eager step, before or after its first
    run."""

    TRACED = enum.auto()
    BEGINS = enum.auto()
    RAN = enum.auto()


@dataclass
class _Traced:
    """The variables and operations that the traces of one step use."""

    handles: _Handles = field(default_factory=dict)
    random_ops: dict[str, tuple[str, bool]] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)  # places where lookup tables change
    python_draws: dict[str, str] = field(default_factory=dict)  # functions by place


_CHANGES_TABLE = re.compile(r"LookupTable(Insert|Remove|Import)(V2)?")


class Touched:
    """The variables and operations that a model's steps, as traced so far, use."""

    def __init__(self, *, has_replicas: bool = False) -> None:
        self.draws = random_ops.Draws(is_shared=has_replicas)
        self.on_step_known: Callable[[str, Stage], None] | None = None  # called with its name
        # `around_trace` is called with the step's name. `at_trace` has the values that callbacks
        # can change at the time of tracing, `stored` those to be used when the step is traced
        # again: JSON by callback and path.
        self.around_trace: Callable[[str], AbstractContextManager[None]] | None = None
        self.at_trace: dict[str, Mapping[Any, str]] = {}
        self.stored: dict[str, Mapping[Any, str]] = {}
        # The frozen parts of the model when `train_step` was traced, if that trace is still in use.
        self.frozen: dict[str, list[int]] | None = None
        self.steps: dict[str, OnData] = {}  # the script's original steps
        self._traced: dict[str, _Traced] = {}  # by step
        self._assigned: dict[str, _Handles] = {}  # variables of steps that run eagerly, by step

    @classmethod
    def of(cls, model: keras.Model) -> Touched:
        touched = attached(model, cls)
        if touched is None:
            touched = cls(has_replicas=has_several_replicas(model.distribute_strategy))
            attach(model, touched)
        return touched

    @property
    def has_traces(self) -> bool:
        return bool(self._traced)

    def has(self, variable: Any) -> bool:
        """True if a step uses `variable`, of Keras or TensorFlow, or a replica's part of it."""
        ids = {id(handle) for handle in _get_handles(variable)}
        return any(not ids.isdisjoint(traced.handles) for traced in self._traced.values())

    def random_ops(self) -> dict[str, tuple[str, bool]]:
        """Returns random ops whose draws cannot be resumed, by place in the script: the type of the
        op, and True if it has a seed."""
        return {
            place: op for traced in self._traced.values() for place, op in traced.random_ops.items()
        }

    def tables(self) -> list[str]:
        """Returns the places in the script that change a lookup table."""
        return [place for traced in self._traced.values() for place in traced.tables]

    def python_draws(self) -> dict[str, str]:
        """Returns the functions that draw from a generator of Python or NumPy, by place in the
        script."""
        return {
            place: function
            for traced in self._traced.values()
            for place, function in traced.python_draws.items()
        }

    def forget(self, step: str) -> None:
        """Discards the records of a step. Call it when the step will be traced again."""
        self._traced.pop(step, None)
        self._assigned.pop(step, None)
        if self.at_trace.pop(step, None) is not None:
            self.stored.pop(step, None)
        if step == "train_step":
            self.frozen = None

    def others(self, known: Iterable[Any]) -> list[str]:
        """Returns the places where steps use variables that are not among `known`."""
        ids = {id(handle) for variable in known for handle in _get_handles(variable)}
        return [
            where or f"{step}, {_described(handle)}"
            for step, handles in self._handles_by_step()
            for number, (handle, where) in handles.items()
            if number not in ids
        ]

    def _handles_by_step(self) -> Iterator[tuple[str, _Handles]]:
        for step, traced in self._traced.items():
            yield step, traced.handles
        yield from self._assigned.items()

    @contextmanager
    def restored(self, known: Iterable[Any]) -> Iterator[None]:
        """Restores the variables that steps use, except those in `known`, at the end."""
        ids = {id(handle) for variable in known for handle in _get_handles(variable)}
        values = [
            (handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=_get_dtype(handle)))
            for traced in self._traced.values()
            for number, (handle, _) in traced.handles.items()
            if number not in ids
        ]
        try:
            yield
        finally:
            for handle, value in values:
                with tf.device(handle.device):
                    tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def recording(
        self,
        name: str,
        step: OnData,
        has_twins: Callable[[], bool],
        is_eager: Callable[[], bool] = lambda: False,
    ) -> OnData:
        """Returns a function like `step` that records its traces.

        Args:
            name: The name of the step, the same in every process.
            step: The step, a function of a batch.
            has_twins: A function that returns True if the step's random ops are replaced by those
                of `random_ops`.
            is_eager: A function that returns True if the step runs eagerly in `fit`, and not only
                for a diagnosis.
        """

        self.steps[name] = step

        def recorded(data: Any) -> Any:
            if tf.executing_eagerly():
                return self._run_eagerly(name, step, data) if is_eager() else step(data)
            twins = random_ops.counted(self.draws, name, data) if has_twins() else nullcontext()
            traced = self._traced.setdefault(name, _Traced())

            def drawn(frame: FrameType, function: str) -> None:
                if (place := _frame_place(frame)) is not None:
                    traced.python_draws[place] = function

            around = nullcontext() if self.around_trace is None else self.around_trace(name)
            with around, twins, python_draws.watched(drawn):
                found = step(data)
            self._record(tf.compat.v1.get_default_graph(), name)
            return found

        return recorded

    def _run_eagerly(self, name: str, step: OnData, data: Any) -> Any:
        """Runs a step that is not traced; the first run records the variables that it assigns."""
        if name in self._assigned:
            return step(data)
        self._notify(name, Stage.BEGINS)
        assigned = self._assigned[name] = {}

        def on_op(op: str, inputs: Any, *_: Any, graph: Any = None, **__: Any) -> None:
            if graph is None and op != "ReadVariableOp":  # most reads are not reported
                for each in filter(_is_variable, inputs):
                    assigned.setdefault(id(each), (each, _place_in_stack(sys._getframe(1))))

        op_callbacks.add_op_callback(on_op)
        try:
            found = step(data)
        finally:
            op_callbacks.remove_op_callback(on_op)
        self._notify(name, Stage.RAN)
        return found

    def _notify(self, step: str, stage: Stage) -> None:
        if self.on_step_known is not None:
            self.on_step_known(step, stage)

    def _record(self, graph: Any, step: str) -> None:
        traced = self._traced.setdefault(step, _Traced())
        for handle, inside in graph.captures:
            is_ours = _excluded.get(id(handle)) is handle or self.draws.has(handle)
            if _is_variable(handle) and not is_ours and id(handle) not in traced.handles:
                traced.handles[id(handle)] = handle, _find_use(inside)
        for operation in _operations(graph, set()):
            if _CHANGES_TABLE.fullmatch(operation.type):
                traced.tables.append(_place(operation) or "an unknown place")
            if _KEEPS_RANDOM_STATE.fullmatch(operation.type):
                is_seeded = operation.get_attr("seed") or operation.get_attr("seed2")
                place = _place(operation) or "an unknown place"
                traced.random_ops.setdefault(place, (operation.type, bool(is_seeded)))
        with tf.init_scope():
            self._notify(step, Stage.TRACED)


def exclude_variable(variable: Any) -> Any:
    """Excludes a variable that the package adds to a step and that is not part of a run's state."""
    for handle in _get_handles(variable):
        _excluded[id(handle)] = handle
    return variable


def native(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras or TensorFlow variable."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def parts(variable: Any) -> tuple[Any, ...]:
    """Returns the variables of the replicas in this process."""
    of_all = native(variable)
    if isinstance(of_all, tf.distribute.DistributedValues):
        return tuple(of_all.values)
    return (of_all,)


def is_of_replicas(variable: Any) -> bool:
    """True if the replicas' values may differ."""
    of_all = native(variable)
    return isinstance(of_all, tf.distribute.DistributedValues) and (
        of_all.synchronization == tf.VariableSynchronization.ON_READ
        or of_all.aggregation == tf.VariableAggregation.NONE
    )


def _get_handles(variable: Any) -> list[Any]:
    return [getattr(part, "handle", None) for part in parts(variable)]


def _is_variable(captured: tf.Tensor) -> bool:
    shape_data = getattr(captured, "_handle_data", None)
    return captured.dtype == tf.resource and bool(
        shape_data and shape_data.is_set and shape_data.shape_and_type
    )


def _get_dtype(handle: Any) -> tf.DType:
    return tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)


def _described(handle: Any) -> str:
    shape_data = handle._handle_data.shape_and_type[0]
    return f"{_get_dtype(handle).name} of shape {tf.TensorShape(shape_data.shape)}"


def _operations(graph: Any, seen: set[str]) -> Iterator[Any]:
    """Yields the operations of a graph and of the functions that it calls."""
    yield from graph.get_operations()
    for name, function in getattr(graph, "_functions", {}).items():
        inner = getattr(function, "graph", None)
        if inner is not None and name not in seen:
            seen.add(name)
            yield from _operations(inner, seen)


def _find_use(tensor: Any) -> str | None:
    return next(filter(None, map(_place, tensor.consumers())), None)


def _place(operation: Any) -> str | None:
    """Returns the user's line, within the step, that has created an operation, such as
    `call (train.py, line 14)`."""
    for frame in reversed(operation.traceback):
        if frame.filename == __file__:
            return None  # the callers of `fit` are not part of the step
        if _is_the_users(frame.filename):
            return f"{frame.name} ({Path(frame.filename).name}, line {frame.lineno})"
    return None


def _frame_place(frame: FrameType) -> str | None:
    """Returns a place like `_place` if `frame` itself runs user code; otherwise None."""
    code = frame.f_code
    if not _is_the_users(code.co_filename):
        return None
    return f"{code.co_name} ({Path(code.co_filename).name}, line {frame.f_lineno})"


def _place_in_stack(frame: FrameType) -> str | None:
    """Returns the innermost place of user code between a step and `frame`."""
    within = takewhile(lambda each: each.f_code.co_filename != __file__, callers(frame))
    return next(filter(None, map(_frame_place, within)), None)


def _is_the_users(filename: str) -> bool:
    return not filename.startswith(("<frozen", "<string>", *NOT_THE_USERS))
