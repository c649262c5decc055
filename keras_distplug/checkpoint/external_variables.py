"""Saves variables that a step uses but the model does not own: states of stateful layers, a weight
of the loss that a callback raises, seeds of an augmentation that `train_step` calls."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_distplug.backend.tensorflow.replicas import touched
from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.checkpoint import callback_states, own_states, reachable
from keras_distplug.cluster.channel import Channel

PREFIX = "outside/"
_OF_ALL = "all"  # replicas
_KEEPS_STATE = (
    "keeps its random state where it cannot be read. Draw with keras.random, with a "
    "keras.random.SeedGenerator that the layer or model makes in __init__"
)
_IS_DRAWN_ONCE = (
    "runs when the step is traced, not in every step: all steps use the same number, and a resumed "
    "run draws another one. Draw with keras.random or tf.random"
)
_HAS_NO_SEED = (
    "has no seed. Call keras.utils.set_random_seed(1) before you create the model and its data"
)


class ExternalVariables:
    """The variables outside the model that steps use, during one `fit`.

    They are known once a step has been traced. When a run is resumed, existing ones get their
    values back before that; the others, once the first step has made them, before it runs.

    Args:
        model: The model in training.
        callbacks: The other callbacks, which may change such variables.
        warns: True if this process warns about state that cannot be resumed.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        warns: bool,
    ) -> None:
        self._model = model
        self._touched = touched.Touched.of(model)
        steps = {"steps": self._touched.steps}
        self._roots = {"model": model, **steps, **dict(callback_states.named_callbacks(callbacks))}
        self._warns = warns
        self._has_traced = False
        self._found: dict[str, Any] | None = None
        self._waiting: dict[str, dict[str, np.ndarray]] = {}
        self._rank = self._world_size = 0
        self._before_step: set[str] = set()  # existing before the first step, if it runs eagerly
        self._reported: set[str] = set()

    def end(self) -> None:
        """Must be called when `fit` ends."""
        if not self._has_traced:
            return
        self._warn(
            f"{path}: its value in the checkpoint belongs to a variable that no longer exists"
            for path in self._waiting
        )

    def trainable(self) -> dict[str, keras.Variable]:
        """Returns the Keras variables among them, which an optimizer may train, by path."""
        return {
            path: each
            for path, each in self._variables().items()
            if isinstance(each, keras.Variable)
        }

    def find(self, path: str) -> keras.Variable | None:
        """Returns the variable with that path; None if it does not exist."""
        return reachable.resolve(self._roots, path)

    def capture(self, agreement: Channel, world_size: int) -> dict[str, Any]:
        """Returns their values by key, as references. All workers must call this together."""
        variables = self._variables()
        own = {path: each for path, each in variables.items() if touched.is_of_replicas(each)}
        of_replicas = own_states.gather(list(own.values()), agreement, world_size)
        arrays = {
            f"{PREFIX}{_OF_ALL}/{path}": touched.parts(each)[0].read_value()
            for path, each in variables.items()
            if path not in own
        }
        for path, values in zip(own, of_replicas, strict=True):
            for replica, value in enumerate(values):
                arrays[f"{PREFIX}{replica:04}/{path}"] = value
        for path, by_replica in self._waiting.items():  # not created yet
            arrays.update({f"{PREFIX}{each}/{path}": by_replica[each] for each in by_replica})
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray], rank: int, world_size: int) -> None:
        """Assigns the values that `capture` returned and `arrays` contains, now or as soon as the
        variables exist."""
        self._rank, self._world_size, self._waiting = rank, world_size, {}
        for key, value in arrays.items():
            if key.startswith(PREFIX):
                replica, path = key.removeprefix(PREFIX).split("/", 1)
                self._waiting.setdefault(path, {})[replica] = value
        self._assign_waiting()

    def _assign_waiting(self) -> None:
        for path, values in list(self._waiting.items()):
            variable = reachable.resolve(self._roots, path)
            if variable is None:
                continue
            shape = tuple(next(iter(values.values())).shape)
            if shape != tuple(variable.shape):
                self._warn(
                    [
                        f"{path}: it has the shape {shape} in the checkpoint and "
                        f"{tuple(variable.shape)} here, and keeps its own value"
                    ]
                )
                del self._waiting[path]
                continue
            if _OF_ALL in values:
                touched.native(variable).assign(values[_OF_ALL])
            else:
                by_replica = [values[replica] for replica in sorted(values)]
                own_states.assign(variable, by_replica, self._rank, self._world_size)
            del self._waiting[path]

    def _variables(self) -> dict[str, Any]:
        if self._found is None:
            known = self._model_variables()
            ours = {id(touched.native(each)) for each in known}
            is_eager = models.runs_eagerly(self._model)
            others = self._touched.others(known)

            def is_wanted(variable: Any) -> bool:
                if id(touched.native(variable)) in ours:
                    return False
                return is_eager or self._touched.has(variable)

            most = math.inf if is_eager else len(others)
            self._found = reachable.find(self._roots, is_wanted, most) if most else {}
        # Without traces, nothing reports new variables.
        found, self._found = self._found, self._found if self._touched.has_traces else None
        return found

    def _model_variables(self) -> list[keras.Variable]:
        generator = models.global_seed_generator()
        seeds = [] if generator is None else [generator.state]
        return [*models.all_variables(self._model), *seeds]

    def on_step_known(self, stage: touched.Stage) -> None:
        """Must be called as `Touched.on_step_known`."""
        self._found, self._has_traced = None, True
        if stage is not touched.Stage.RAN:
            self._assign_waiting()
        if stage is touched.Stage.BEGINS:
            self._before_step = set(self._variables())
            return
        lines = []
        if stage is touched.Stage.RAN:
            lines += [
                f"{path}: the first step creates this variable and uses its initial value, even in "
                "a resumed run. Create it before `fit`, or don't use run_eagerly"
                for path in self._variables()
                if path not in self._before_step
            ]
        lines += [
            f"{place}: a variable used here is not saved. Make it an attribute of the "
            "model, of its loss or of a callback"
            for place in self._touched.others(
                [*self._model_variables(), *self._variables().values()]
            )
        ]
        lines += [
            f"{place}: {op} {_KEEPS_STATE if is_seeded else _HAS_NO_SEED}"
            for place, (op, is_seeded) in self._touched.random_ops().items()
        ]
        lines += [
            f"{place}: {function} {_IS_DRAWN_ONCE}"
            for place, function in self._touched.python_draws().items()
        ]
        lines += [
            f"{place}: a lookup table changes here, and its content is not saved. Keep values that "
            "change in a tf.Variable"
            for place in self._touched.tables()
        ]
        self._warn(lines)

    def _warn(self, lines: Iterable[str]) -> None:
        new = [line for line in dict.fromkeys(lines) if line not in self._reported]
        self._reported.update(new)
        if new and self._warns:
            listed = "\n".join(f"- {line}." for line in new)
            warnings.warn(f"A resumed run may not compute the same steps:\n{listed}", stacklevel=2)
