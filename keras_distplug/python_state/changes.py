"""What changes in callbacks while a model is trained is state; the rest is configuration."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import json
import math
import queue
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import xxhash

from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.python_state import (
    first_starts,
    functions_state,
    object_states,
    plain_values,
    progress_bars,
    walk,
)
from keras_distplug.python_state.first_starts import Start
from keras_distplug.python_state.walk import Attribute, Owners, Path, Place

_MODEL = "<model>"  # the name of attributes that callbacks set on the model
_GENERATOR = "__generator__"
_DELETED = "__deleted__"
_SAME = "__same__"  # as what has another path
_FEW_CELLS = 100_000  # of a table that is read as a whole
_SMALL = 4096  # characters of a value that is kept as text

SmallValues = Mapping[tuple[str, Path], str]  # JSON by callback and path


@dataclass(frozen=True)
class _Value:
    """A value at some time.

    Args:
        kind: Of the means to save it: "plain", "variables", "generator", "bar", or "" for none.
        digest: Another one once the value has changed.
        encoded: JSON-able; None where nothing can save it.
        arrays: Arrays in it, by key.
    """

    kind: str
    digest: Any
    encoded: Any = None
    arrays: Mapping[str, np.ndarray] | None = None


class Changes:
    """The changes of callbacks since training started.

    Example:

    ```python
    changes = Changes({"WarmUp": warm_up}, model)
    ...  # `warm_up` counts batches in `self.seen`
    changes.capture(arrays, "callbacks/")  # {"WarmUp": [{"path": ["seen"], "value": 12, ...}]}
    ```

    Args:
        callbacks: By name, after their `on_train_begin`.
        model: The model in training, whose variables are not a callback's.
        is_alone: Whether no other worker has another copy of what the model keeps in Python.
    """

    def __init__(
        self,
        callbacks: Mapping[str, keras.callbacks.Callback],
        model: keras.Model,
        *,
        is_alone: bool = True,
    ) -> None:
        self._is_alone = is_alone
        self._callbacks = callbacks
        self._model = model
        self._names = [*callbacks, _MODEL]
        self._lost: dict[str, None] = {}
        self._note_known()
        self._code = {name: functions_state.of(each) for name, each in callbacks.items()}
        self._owners = {name: Owners() for name in self._names}  # when training started
        self._starts: dict[str, dict[Path, Start]] = {}
        for name in self._names:
            owners = Owners()
            places = self._places(name, owners)
            starts = {place.path: self._start(place.value) for place in places}
            self._starts[name] = self._since_first(name, starts)
            self._owners[name] = owners

    def unsound(self) -> list[str]:
        """Returns what of the callbacks a resumed run cannot restore, as known from their start."""
        lines = []
        for name, callback in self._callbacks.items():
            if not walk.is_of_script(type(callback)):
                continue
            lines += [
                f"{name}.{place.title}: the position of {what} cannot be saved"
                for place in self._places(name, Owners())
                if not place.is_global and (what := _positioned(place.value))
            ]
            if self._code[name].stops_by_clock:
                lines.append(f"{name}: stops training by a clock, which runs on between processes")
        return lines

    @property
    def lost(self) -> list[str]:
        """Attributes that have changed and could not be saved: `Meter.bar (Bar)`."""
        return list(self._lost)

    def capture(self, arrays: dict[str, Any], prefix: str) -> dict[str, list[Any]]:
        """Returns what has changed, JSON-able, by callback.

        Args:
            arrays: Gets copies of arrays by key.
            prefix: Starts these keys.
        """
        self._note_known()
        changed: dict[str, list[Any]] = {}
        for name in self._names:
            saved, lost = self._changed(name)
            flags = self._note_lost(name, lost)
            states: list[Any] = [
                {"path": list(path), "value": {_DELETED: True}} for path in self._deleted(name)
            ]
            for place, value, is_same in saved:
                if isinstance(place.value, bool) and place.path[-1] in flags:
                    continue  # it says that there is an object which could not be saved
                key = f"{prefix}{name}/changed/{len(states)}:"
                arrays.update({f"{key}{k}": np.array(v) for k, v in (value.arrays or {}).items()})
                states.append(
                    {"path": list(place.path), "value": value.encoded, "same": is_same, "key": key}
                )
            if states:
                changed[name] = states
        return changed

    def _changed(self, name: str) -> tuple[list[tuple[Place, _Value, bool]], list[Place]]:
        """What has changed, each with whether it is the same object still; and what of it cannot
        be saved."""
        saved, lost = [], []
        starts = self._starts[name]
        code = self._code.get(name)
        places = self._places(name, Owners())
        shared = self._shared(name, places)
        for place in places:
            if self._is_models(place.value) or (code and place.path[-1] in code.clocks):
                continue
            value, start = self._value(place.value), starts.get(place.path)
            is_same = start is not None and start.number == id(place.value)
            if not is_same and (path := shared.get(place.path)) is not None:
                saved.append((place, _Value("plain", None, {_SAME: list(path)}), False))
                continue
            if start is not None and start.digest == value.digest:
                continue
            is_holder = value.kind in ("variables", "generator")
            if value.kind == "" or (is_holder and (start is None or start.kind != value.kind)):
                lost.append(place)  # or it was made during training
                continue
            if place.path[:-1] and not self._is_there(name, place.path):
                lost.append(place)  # a part of an object that was made during training
            saved.append((place, value, is_same))
        return saved, lost

    def _shared(self, name: str, places: Sequence[Place]) -> dict[Path, Path]:
        """Paths of what is the same object or container as what has another path, and that path."""
        starts = self._starts[name]
        there = {path for path, _ in self._owners[name].objects.values()}
        shared = {
            each.path: each.same_as
            for each in places
            if each.same_as is not None and each.same_as in there
        }
        first: dict[int, Path] = {}
        kinds = (*walk.CONTAINERS, keras.Variable, tf.Variable)
        containers = [each for each in places if isinstance(each.value, kinds)]
        for each in containers:
            start = starts.get(each.path)
            if start is not None and start.number == id(each.value):
                first.setdefault(id(each.value), each.path)
        for each in containers:
            path = first.setdefault(id(each.value), each.path)
            if path != each.path:
                shared[each.path] = path
        return shared

    def _note_lost(self, name: str, lost: Sequence[Place]) -> frozenset[str]:
        """Keeps what cannot be saved for a report. Returns the names of flags set beside it."""
        code = self._code.get(name)
        owner = self._callbacks.get(name, self._model)
        if code is None or not walk.is_of_script(type(owner)):
            return frozenset()  # libraries make their bars again
        titles: dict[str, None] = {}
        for place in lost:
            if place.path[0] not in code.made_in_epochs:
                first = (*place.path[:1], *place.path[1:2]) if len(place.path) > 2 else place.path
                title = walk.title_of(first)
                kind = f" ({type(place.value).__name__})" if first == place.path else ""
                titles[f"{name}.{title}{kind}"] = None
        self._lost.update(titles)
        return code.flags_beside({part for place in lost for part in place.path})

    def _deleted(self, name: str) -> list[Path]:
        """Attributes of callbacks that are gone since training started."""
        if name == _MODEL:
            return []
        there = set(walk.attribute_names(self._callbacks[name]))
        return [path for path in self._starts[name] if len(path) == 1 and path[0] not in there]

    def _is_there(self, name: str, path: Path) -> bool:
        """Returns whether the owner of a value was there at the start."""
        owner = path[:-1]
        is_variable = owner[-1] in ("<closure>", "<global>")
        return path in self._starts[name] or owner in self._owners[name].setters or is_variable

    def restore(
        self, states: Mapping[str, Sequence[Any]], arrays: Mapping[str, np.ndarray]
    ) -> list[str]:
        """Restores what `capture` returned. Returns the attributes that no longer exist."""
        self._note_known()
        missing = []
        for name in self._names:
            own = states.get(name, ())
            is_shared = [_is_shared(state["value"]) for state in own]
            # What refers to others comes last, when these are what they were.
            for refers in (False, True)[: 1 + any(is_shared)]:
                owners = Owners()
                places = {place.path: place for place in self._places(name, owners)}
                for state, refers_too in zip(own, is_shared, strict=True):
                    path = tuple(state["path"])
                    place = places.get(path)
                    if refers_too != refers:
                        continue
                    try:
                        self._restore_one(name, state, place, owners, path, arrays)
                    except (LookupError, TypeError, ValueError, AttributeError):
                        missing.append(f"{name}.{walk.title_of(path)}")
                if not refers:
                    saved = {tuple(state["path"]) for state in own}
                    self._undo(name, {k: v for k, v in places.items() if k not in saved})
        return missing

    def _restore_one(
        self,
        name: str,
        state: Mapping[str, Any],
        place: Place | None,
        owners: Owners,
        path: Path,
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        encoded = state["value"]
        if isinstance(encoded, dict) and _DELETED in encoded:
            if place is not None:
                delattr(self._callbacks[name], path[0])
            return
        if _is_shared(encoded):
            value = self._at(name, tuple(encoded[_SAME]), owners)
            put = (
                functools.partial(owners.setters[path[:-1]], path[-1])
                if place is None
                else place.put
            )
            put(value)
            return
        key = state["key"]
        own = {k.removeprefix(key): v for k, v in arrays.items() if k.startswith(key)}
        if place is None:
            if progress_bars.is_position(encoded):
                return  # a bar that is made later starts at zero
            owners.setters[path[:-1]](path[-1], plain_values.decode(encoded, own))
        elif progress_bars.is_position(encoded):
            if progress_bars.is_bar(place.value):
                progress_bars.seek(place.value, encoded)
        elif isinstance(encoded, dict) and _GENERATOR in encoded:
            if not object_states.is_generator(place.value):
                raise LookupError("it is no generator")
            object_states.put(place.value, encoded[_GENERATOR])
        else:
            self._put(place, plain_values.decode(encoded, own), is_same=state["same"])

    def _put(self, place: Place, value: Any, *, is_same: bool) -> None:
        if (variables := self._own_variables(place.value)) is not None:
            if isinstance(place.value, keras.Model) and len(value) > len(variables):
                with contextlib.suppress(Exception):  # reported below if it lacks variables
                    place.value.optimizer.build(place.value.trainable_variables)
                variables = self._own_variables(place.value) or []
            if [each.shape for each in variables] != [each.shape for each in value]:
                raise LookupError("it has other variables")
            for variable, each in zip(variables, value, strict=True):
                variable.assign(each)
            return
        # Another object took its place; the first one may have other uses.
        put = plain_values.put if is_same else plain_values.replace
        made = put(place.value, value)
        if made is not place.value:
            try:
                place.put(made)
            except LookupError:
                if plain_values.put(place.value, value) is not place.value:
                    raise

    def _undo(self, name: str, places: Mapping[Path, Place]) -> None:
        """Undoes what an epoch that begins again has changed: these values were those of the
        start."""
        for path, place in places.items():
            start = self._starts[name].get(path)
            if start is first_starts.ABSENT and isinstance(place.put, Attribute):
                place.put.delete()
                continue
            if start is None or start.encoded is None:
                continue
            code = self._code.get(name)
            is_clock = code is not None and path[-1] in code.clocks
            if not is_clock and self._value(place.value).digest != start.digest:
                value = plain_values.decode(json.loads(start.encoded), {})
                with contextlib.suppress(LookupError):
                    self._put(place, value, is_same=id(place.value) == start.number)

    def _at(self, name: str, path: Path, owners: Owners) -> Any:
        """The object or container with a path."""
        if (found := owners.at(path)) is not None:
            return found
        for place in self._places(name, Owners()):
            if place.path == path:
                return place.value
        raise LookupError(path)

    def _places(self, name: str, owners: Owners) -> list[Place]:
        at_start = self._owners[name]
        if name == _MODEL:
            return walk.places_set_on(
                self._model,
                list(self._callbacks.values()),
                owners,
                at_start,
                by_itself=self._is_alone,
            )
        callback = self._callbacks[name]
        others = [each for each in self._callbacks.values() if each is not callback]
        return walk.places_of(callback, [self._model, *others], owners, at_start)

    def _note_known(self) -> None:
        self._known = {id(each) for each in models.all_variables(self._model)}

    def _is_models(self, value: Any) -> bool:
        """Returns whether a value refers only to variables of the model."""
        if isinstance(value, keras.Variable | tf.Variable):
            return id(value) in self._known
        if isinstance(value, list | tuple) and value:
            return all(map(self._is_models, value))
        variables = walk.variables_of(value)
        return bool(variables) and not self._own_variables(value)

    def _own_variables(self, value: Any) -> list[Any] | None:
        variables = walk.variables_of(value)
        if variables is None:
            return None
        return [each for each in variables if id(each) not in self._known]

    def _start(self, value: Any) -> Start:
        now = self._value(value)
        is_container = isinstance(value, walk.CONTAINERS)
        return Start(now.kind, now.digest, id(value), _text(now), is_container)

    def _since_first(self, name: str, starts: Mapping[Path, Start]) -> dict[Path, Start]:
        """Replaces what an earlier `fit` of this process has changed by what that started with."""
        if name == _MODEL:
            codes = [*self._code.values(), functions_state.of(self._model)]
            changed = frozenset().union(*(each.changed for each in codes))
            return first_starts.since_first(
                self._model, starts, lambda path: path[-1] in changed, lambda path: False
            )
        code = self._code[name]
        return first_starts.since_first(
            self._callbacks[name],
            starts,
            lambda path: len(path) > 1 or path[0] in code.changed,
            lambda path: len(path) == 1 and path[0] in code.made,
        )

    def small_values(self) -> SmallValues:
        """Returns the numbers, text and short lists of these that callbacks can change."""
        return {key: text for key, _, text in self._small_places()}

    def small_values_at_start(self) -> SmallValues:
        """Returns the same when training started."""
        return {
            (name, path): start.encoded
            for name, starts in self._starts.items()
            for path, start in starts.items()
            if start.encoded is not None
        }

    @contextlib.contextmanager
    def with_small_values(self, values: SmallValues) -> Iterator[None]:
        """Replaces `small_values` by `values`, for a while; nothing if these are empty."""
        with contextlib.ExitStack() as undo:
            for key, place, text in self._small_places():
                if values.get(key, text) != text:
                    undo.callback(_exchange(place, text, values[key]))
                elif (
                    values
                    and self._is_newer(key, values)
                    and isinstance(place.put, Attribute)
                    and place.put.has_default  # `n += 1` hides the `n` of the class since then
                ):
                    place.put.delete()
                    undo.callback(place.put, place.value)
            yield

    def _is_newer(self, key: tuple[str, Path], values: SmallValues) -> bool:
        """Returns whether a value was made after training started and `values` were taken."""
        name, path = key
        return key not in values and path not in self._starts[name]

    def _small_places(self) -> Iterator[tuple[tuple[str, Path], Place, str]]:
        for name in self._names:
            code = self._code.get(name)
            for place in self._places(name, Owners()):
                is_clock = code is not None and place.path[-1] in code.clocks
                if not is_clock and (text := _text(self._value(place.value))) is not None:
                    yield (name, place.path), place, text

    def _value(self, value: Any) -> _Value:
        if type(value) in (bool, int, str, type(None)):
            return _Value("plain", (type(value), value), value)
        arrays: dict[str, np.ndarray] = {}
        try:
            kind, encoded = self._encode(value, arrays)
            digest = xxhash.xxh3_64(json.dumps(encoded))
        except Exception:  # noqa: BLE001 (it cannot be saved, or raises when it is looked at)
            return _Value("", (type(value).__name__, id(value), _mark(value)))
        for array in arrays.values():
            digest.update(repr((array.shape, object_states.mark_of_array(array))))
        return _Value(kind, (kind, digest.intdigest()), encoded, arrays)

    def _encode(self, value: Any, arrays: dict[str, np.ndarray]) -> tuple[str, Any]:
        if progress_bars.is_bar(value):
            return "bar", progress_bars.encode(value)
        if object_states.is_generator(value):
            return "generator", {_GENERATOR: object_states.encode(value)}
        variables = self._own_variables(value)
        encoder = plain_values.Encoder(arrays, np.asarray)
        if variables is not None:
            return "variables", encoder.encode(variables, "")
        return "plain", encoder.encode(value, "")


def _is_shared(encoded: Any) -> bool:
    return isinstance(encoded, dict) and _SAME in encoded


def _text(value: _Value) -> str | None:
    """A small value without arrays as text."""
    if value.kind != "plain" or value.arrays:
        return None
    text = json.dumps(value.encoded)
    return text if len(text) <= _SMALL else None


def _exchange(place: Place, now: str, text: str) -> Callable[[], Any]:
    """Gives a small value, `now` as text, the value of another text. Returns what undoes that."""
    before, value = (plain_values.decode(json.loads(each), {}) for each in (now, text))
    made = plain_values.put(place.value, value)  # in place, as others may refer to it, too
    if made is place.value:
        return functools.partial(plain_values.put, made, before)
    try:
        place.put(made)
    except LookupError:
        return lambda: None
    return functools.partial(place.put, place.value)


def _mark(value: Any) -> Any:
    """Differs once an object that cannot be saved has changed in place, as far as that is cheap."""
    if isinstance(value, queue.Queue):
        return [id(each) for each in list(value.queue)]
    if isinstance(value, list | dict | set | tuple | collections.deque):
        return len(value)
    if type(value).__module__.split(".")[0] == "pandas":
        shape = getattr(value, "shape", ())
        with contextlib.suppress(Exception):  # an odd index, or entries that raise when shown
            if math.prod(shape) <= _FEW_CELLS:
                return xxhash.xxh3_64_intdigest(repr(value.to_dict()))
        return shape
    return None


def _positioned(value: Any) -> str | None:
    """Names what keeps its place where nothing can read it."""
    if isinstance(value, io.IOBase):
        is_file = not value.closed and value.writable() and value.seekable()
        return "an open file" if is_file and value not in (sys.stdout, sys.stderr) else None
    return "an iterator" if isinstance(value, Iterator) else None
