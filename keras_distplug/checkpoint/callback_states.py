"""Converts the state of a training job's other callbacks to JSON and arrays, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_distplug.backend.tensorflow.replicas.retraces import Retraces
from keras_distplug.backend.tensorflow.replicas.touched import Touched
from keras_distplug.backend.tensorflow.runtime import keras_callbacks
from keras_distplug.checkpoint.traced_values import TracedValues
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.python_state.callback_changes import CallbackChanges
from keras_distplug.python_state.plain_values import Encoder, UnsavableError, decode

PREFIX = "callbacks/"
_STEPS = "<steps>"  # stands in for a callback's name: values that traced steps depend on


class CallbackStates:
    """The states of callbacks during one `fit`.

    For a callback with `state_dict()` and `load_state_dict(state)`, the state is what these return
    and accept. For Keras' own callbacks, it is the attributes that decide how training continues.
    For others, and for the additions of subclasses of Keras' own, it is everything that changes
    during training.

    Args:
        callbacks: The callbacks, after their `on_train_begin`.
        model: The model in training.
        is_alone: As for `CallbackChanges`.

    Raises:
        ConfigurationError: If a `state_dict()` returns something that cannot be saved.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        *,
        is_alone: bool = True,
    ) -> None:
        self._callbacks = dict(named_callbacks(callbacks))
        self._lost: dict[str, None] = {}
        for name, callback in self._callbacks.items():
            if _has_state_methods(callback):
                self._check(name, callback.state_dict())
        watched = {
            name: callback
            for name, callback in self._callbacks.items()
            if not (_has_state_methods(callback) or _is_ours(callback))
        }
        others = [each for name, each in self._callbacks.items() if name not in watched]
        self._changes = CallbackChanges(watched, model, others=others, is_alone=is_alone)
        self._traced_values = TracedValues(self._changes, Touched.of(model), Retraces.of(model))

    def _check(self, name: str, state: Any) -> None:
        try:
            Encoder({}, np.asarray).encode(state, "")
        except UnsavableError as error:
            where = f", at `{error.path[1:]}`" * bool(error.path)
            raise ConfigurationError(
                f"Expected {name}.state_dict() to return numbers, text, arrays, and lists, tuples, "
                f"sets and dicts of these. Received{where}: {error.value!r}. "
                "Return it in one of these forms, or omit it."
            ) from error

    def unsound(self) -> list[str]:
        """Returns the parts of the callbacks known before training not to be resumable."""
        return self._changes.unsound()

    @property
    def lost(self) -> list[str]:
        """The names of values that have changed since and could not be saved."""
        return [*self._lost, *self._changes.lost]

    def capture(self) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
        """Returns the name and JSON-able state of every callback that has one, and the states'
        arrays by key. Arrays that Keras' callbacks never change are not copied."""
        arrays: dict[str, Any] = {}
        changed = self._changes.capture(arrays, PREFIX)
        states: list[dict[str, Any]] = []
        for name, callback in self._callbacks.items():
            state: dict[str, Any] = {}
            key = f"{PREFIX}{name}"
            if (known := keras_callbacks.get_callback_state(callback)) is not None:
                # Keras' callbacks replace their arrays instead of changing them.
                state["keras"] = Encoder(arrays, np.asarray).encode(known, key)
            if _has_state_methods(callback):
                try:
                    state["own"] = Encoder(arrays).encode(callback.state_dict(), key)
                except UnsavableError as error:
                    self._lost[f"{name}.state_dict()[{error.path[1:]}]"] = None
            if name in changed:
                state["changed"] = changed.pop(name)
            if state:
                states.append({"callback": name, "state": state})
        states += [{"callback": name, "state": {"changed": each}} for name, each in changed.items()]
        if traced := self._traced_values.capture():
            states.append({"callback": _STEPS, "state": traced})
        return tuple(states), arrays

    def restore(
        self,
        states: Sequence[Mapping[str, Any]],
        arrays: Mapping[str, np.ndarray],
        *,
        epoch: int,
        is_anew: bool,
    ) -> list[keras.callbacks.Callback]:
        """Restores the states from `capture` in the callbacks of the same class and position.

        Args:
            states: From `capture`.
            arrays: From `capture`.
            epoch: Index of the next epoch.
            is_anew: As in `keras_callbacks.set_state`.

        Returns:
            The callbacks that had a state.
        """
        by_name = {each["callback"]: each["state"] for each in states}
        restored = []
        for name, callback in self._callbacks.items():
            if (state := by_name.get(name)) is None:
                continue
            if "keras" in state:
                known = decode(state["keras"], arrays)
                keras_callbacks.set_state(callback, known, epoch=epoch, is_anew=is_anew)
            if "own" in state and _has_state_methods(callback):
                callback.load_state_dict(decode(state["own"], arrays))
            restored.append(callback)
        changed = {name: state.get("changed", ()) for name, state in by_name.items()}
        self._lost.update(dict.fromkeys(self._changes.restore(changed, arrays)))
        self._traced_values.restore(by_name.get(_STEPS, {}))
        return restored


def named_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Yields every callback with a name that is the same in the next process, such as
    `EarlyStopping` and `EarlyStopping#2`."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        # A stand-in for a callback that runs on the chief only still takes its place in the count.
        name = type(getattr(callback, "stands_for", callback)).__name__
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}#{counts[name]}", callback


def _has_state_methods(callback: keras.callbacks.Callback) -> bool:
    names = ("state_dict", "load_state_dict")
    # Not by `hasattr`: a `__getattr__` may accept any name.
    return all(
        callable(getattr(type(callback), name, None) or vars(callback).get(name)) for name in names
    )


def _is_ours(callback: keras.callbacks.Callback) -> bool:
    return type(callback).__module__.startswith("keras_distplug.")
