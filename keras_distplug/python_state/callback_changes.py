"""Tracks changes in callbacks during training: what changes is state, the rest is configuration."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.python_state import changes, plain_values, script_code, walk
from keras_distplug.python_state.changes import DELETED, SAME, Changes, Policy, Saved, Value
from keras_distplug.python_state.walk import Attribute, Owners, Path, Place, Walked

_MODEL = "<model>"  # stands for attributes that callbacks set on the model
_SMALL = 4096  # largest value kept as text, in characters

SmallValues = Mapping[tuple[str, Path], str]  # JSON by callback and path


class CallbackChanges:
    """The changes of callbacks, and of Python attributes of the model, since training started.

    Example:

    ```python
    changes = CallbackChanges({"WarmUp": warm_up}, model)
    ...  # `warm_up` counts batches in `self.seen`
    changes.capture(arrays, "callbacks/")  # {"WarmUp": [{"path": ["seen"], "value": 12, ...}]}
    ```

    Args:
        callbacks: Callbacks by name, after their `on_train_begin`.
        model: The model in training, whose variables do not belong to a callback.
        others: Callbacks that save their own state; references from `callbacks` to them are not
            followed.
        is_alone: True if no other worker has a copy of the model's Python attributes.
    """

    def __init__(
        self,
        callbacks: Mapping[str, keras.callbacks.Callback],
        model: keras.Model,
        *,
        others: Sequence[keras.callbacks.Callback] = (),
        is_alone: bool = True,
    ) -> None:
        self._is_alone = is_alone
        self._others = others
        self._callbacks = callbacks
        self._model = model
        self._lost: dict[str, None] = {}
        self._note_known()
        self._code = {name: script_code.find_code(each) for name, each in callbacks.items()}
        self._changes = {
            name: Changes(owner, functools.partial(self._walk, name), self._policy(name))
            for name, owner in {**callbacks, _MODEL: model}.items()
        }
        # `small_values` when training started.
        self.small_values_at_start: SmallValues = {
            (name, path): text
            for name, each in self._changes.items()
            for path, start in each.starts.items()
            if start.kept is not None and (text := _text(start.kept)) is not None
        }

    def _walk(self, name: str, at_start: Owners) -> Walked:
        callbacks = list(self._callbacks.values())
        if name == _MODEL:
            return walk.from_model(
                self._model, callbacks, at_start, includes_own_code=self._is_alone
            )
        callback = self._callbacks[name]
        others = [each for each in (*callbacks, *self._others) if each is not callback]
        return walk.from_callback(callback, [self._model, *others], at_start)

    def _policy(self, name: str) -> Policy:
        code = self._code.get(name)
        codes = (
            [*self._code.values(), script_code.find_code(self._model)] if code is None else [code]
        )
        changed = frozenset().union(*(each.changed for each in codes))
        clocks = frozenset() if code is None else code.clocks
        return Policy(
            look=functools.partial(changes.look, variables=self._own_variables),
            keeps=lambda value: _text(value) is not None,
            variables=self._own_variables,
            is_ignored=lambda place: place.path[-1] in clocks or self._is_models(place.value),
            is_assigned=lambda path: (code is not None and len(path) > 1) or path[-1] in changed,
            is_made=lambda path: code is not None and len(path) == 1 and path[0] in code.made,
        )

    def unsound(self) -> list[str]:
        """Returns the parts of callbacks that are known at the start not to be resumable."""
        lines = []
        for name, callback in self._callbacks.items():
            if not script_code.is_of_script(type(callback)):
                continue
            lines += [
                f"{name}.{walk.get_title(place.path)}: the position of {what} cannot be saved"
                for place in self._changes[name].places()[0]
                if not place.is_global and (what := _positioned(place.value))
            ]
            if self._code[name].stops_by_clock:
                lines.append(f"{name}: stops training by a clock, which keeps running between runs")
        return lines

    @property
    def lost(self) -> list[str]:
        """Attributes that have changed and could not be saved, such as `Meter.bar (Bar)`."""
        return list(self._lost)

    def capture(self, arrays: dict[str, Any], prefix: str) -> dict[str, list[Any]]:
        """Returns the changes, JSON-able, by callback.

        Args:
            arrays: Receives copies of arrays by key.
            prefix: Prefix of these keys.
        """
        self._note_known()
        changed: dict[str, list[Any]] = {}
        for name in self._changes:
            saved, lost = self._changed(name)
            flags = self._note_lost(name, lost)
            states: list[Any] = [
                {"path": list(path), "value": {DELETED: True}} for path in self._deleted(name)
            ]
            for place, each in saved:
                if isinstance(place.value, bool) and place.path[-1] in flags:
                    continue  # the flag says that an object exists, which could not be saved
                key = f"{prefix}{name}/changed/{len(states)}:"
                arrays.update({f"{key}{k}": np.array(v) for k, v in each.arrays.items()})
                state = {"path": list(each.path), "value": each.encoded, "same": each.is_same}
                states.append({**state, "key": key})
            if states:
                changed[name] = states
        return changed

    def _changed(self, name: str) -> tuple[list[tuple[Place, Saved]], list[Place]]:
        """Returns the saved changes, and the changed values that cannot be saved."""
        own = self._changes[name]
        places, _ = own.places()
        shared = self._shared(own, places)
        saved = [
            (place, Saved(place.path, {SAME: list(shared[place.path])}, is_same=False))
            for place in places
            if place.path in shared
        ]
        lost = []
        for place, value, start in own.find_changed(p for p in places if p.path not in shared):
            is_holder = value.kind in ("variables", "generator")
            if value.kind == "" or (is_holder and (start is None or start.kind != value.kind)):
                lost.append(place)  # or it was created during training
                continue
            if place.path[:-1] and not _has_owner(own, place.path):
                lost.append(place)  # part of an object that was created during training
            is_same = own.is_same(place)
            saved.append((place, Saved(place.path, value.encoded, value.arrays, is_same)))
        return saved, lost

    def _shared(self, own: Changes, places: Sequence[Place]) -> dict[Path, Path]:
        """Returns the other path by the path of every object or container that has become identical
        with one under another path."""
        there = {path for path, _ in own.at_start.objects.values()}
        kinds = (*walk.CONTAINERS, keras.Variable, tf.Variable)
        first: dict[int, Path] = {}
        for each in sorted(places, key=own.is_same, reverse=True):  # unchanged ones first
            if isinstance(each.value, kinds):
                first.setdefault(id(each.value), each.path)
        shared = {}
        for each in places:
            path = each.same_as if each.same_as in there else first.get(id(each.value))
            if path not in (None, each.path) and not (own.is_same(each) or own.is_ignored(each)):
                shared[each.path] = path
        return shared

    def _note_lost(self, name: str, lost: Sequence[Place]) -> frozenset[str]:
        """Records unsavable values for a report. Returns the names of flags set along with them."""
        code = self._code.get(name)
        owner = self._callbacks.get(name, self._model)
        if code is None or not script_code.is_of_script(type(owner)):
            return frozenset()  # libraries create their progress bars again
        titles: dict[str, None] = {}
        for place in lost:
            if place.path[0] not in code.made_in_epochs:
                first = (*place.path[:1], *place.path[1:2]) if len(place.path) > 2 else place.path
                title = walk.get_title(first)
                kind = f" ({type(place.value).__name__})" if first == place.path else ""
                titles[f"{name}.{title}{kind}"] = None
        self._lost.update(titles)
        return code.companion_flags({part for place in lost for part in place.path})

    def _deleted(self, name: str) -> list[Path]:
        """Returns attributes of callbacks that were deleted after training started."""
        if name == _MODEL:
            return []
        there = dict(script_code.attributes(self._callbacks[name]))
        starts = self._changes[name].starts
        return [path for path in starts if len(path) == 1 and path[0] not in there]

    def restore(
        self, states: Mapping[str, Sequence[Any]], arrays: Mapping[str, np.ndarray]
    ) -> list[str]:
        """Restores the result of `capture`. Returns the attributes that no longer exist."""
        self._note_known()
        return [
            f"{name}.{walk.get_title(path)}"
            for name, own in self._changes.items()
            for path in own.restore([_saved(each, arrays) for each in states.get(name, ())])
        ]

    def _note_known(self) -> None:
        self._known = {id(each) for each in models.all_variables(self._model)}

    def _is_models(self, value: Any) -> bool:
        """Returns True if a value refers only to variables of the model."""
        if isinstance(value, keras.Variable | tf.Variable):
            return id(value) in self._known
        if isinstance(value, list | tuple) and value:
            return all(map(self._is_models, value))
        variables = walk.list_variables(value)
        return bool(variables) and not self._own_variables(value)

    def _own_variables(self, value: Any) -> list[Any] | None:
        variables = walk.list_variables(value)
        if variables is None:
            return None
        return [each for each in variables if id(each) not in self._known]

    def small_values(self) -> SmallValues:
        """Returns the numbers, text and short lists of these that callbacks can change."""
        return {key: text for key, _, text in self._small_places()}

    @contextlib.contextmanager
    def replace_small_values(self, values: SmallValues) -> Iterator[None]:
        """Temporarily replaces `small_values` with `values`; does nothing if these are empty."""
        with contextlib.ExitStack() as undo:
            for key, place, text in self._small_places():
                if values.get(key, text) != text:
                    undo.callback(_exchange(place, text, values[key]))
                elif (
                    values  # captured before the attribute was created during training
                    and not (key in values or place.path in self._changes[key[0]].starts)
                    and isinstance(place.put, Attribute)
                    and place.put.has_default  # since then, `n += 1` hides the `n` of the class
                ):
                    place.put.delete()
                    undo.callback(place.put, place.value)
            yield

    def _small_places(self) -> Iterator[tuple[tuple[str, Path], Place, str]]:
        for name, own in self._changes.items():
            for place in own.places()[0]:
                if not own.is_ignored(place) and (text := _text(own.look(place.value))) is not None:
                    yield (name, place.path), place, text


def _has_owner(own: Changes, path: Path) -> bool:
    """Returns True if the owner of a value existed at the start."""
    is_variable = path[-2] in ("<closure>", "<global>")
    return path in own.starts or path[:-1] in own.at_start.puts or is_variable


def _saved(state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Saved:
    """Returns the value described by one of the states from `CallbackChanges.capture`."""
    key = state.get("key")  # missing for deleted values
    own = (
        {} if key is None else {k.removeprefix(key): arrays[k] for k in arrays if k.startswith(key)}
    )
    return Saved(tuple(state["path"]), state["value"], own, state.get("same", False))


def _text(value: Value) -> str | None:
    """Returns a small value without arrays as text; None for other values."""
    if value.kind != "plain" or value.arrays:
        return None
    text = json.dumps(value.encoded)
    return text if len(text) <= _SMALL else None


def _exchange(place: Place, now: str, text: str) -> Callable[[], Any]:
    """Sets a small value, given as the text `now`, to that of `text`. Returns the undo function."""
    before, value = (plain_values.decode(json.loads(each), {}) for each in (now, text))
    made = plain_values.put(place.value, value)  # in place, as others may refer to it
    if made is place.value:
        return functools.partial(plain_values.put, made, before)
    try:
        place.put(made)
    except LookupError:
        return lambda: None
    return functools.partial(place.put, place.value)


def _positioned(value: Any) -> str | None:
    """Returns the name of an object with a position that cannot be read; None for others."""
    if isinstance(value, io.IOBase):
        is_file = not value.closed and value.writable() and value.seekable()
        return "an open file" if is_file and value not in (sys.stdout, sys.stderr) else None
    return "an iterator" if isinstance(value, Iterator) else None
