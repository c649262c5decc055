"""What changes in callbacks while a model is trained is state; the rest is configuration."""

from __future__ import annotations

import functools
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import xxhash

from keras_distplug.compat import model as compat_model
from keras_distplug.training import callback_places, object_states, plain_values, progress_bars
from keras_distplug.training.callback_places import Owners, Path, Place

_GENERATOR = "__generator__"
_CLOCKS = (time.perf_counter, time.monotonic, time.process_time)
_CLOCK_NAMES = frozenset(
    f"{clock}{unit}"
    for clock in ("perf_counter", "monotonic", "process_time", "thread_time", "default_timer")
    for unit in ("", "_ns")
)
_TIME_NAMES = _CLOCK_NAMES | {"time", "time_ns", "now", "utcnow"}


_MODEL = "<model>"  # the name of attributes that callbacks set on the model


@dataclass(frozen=True)
class _Unsavable:
    kind: str
    number: int


@dataclass(frozen=True)
class _Bar:
    position: float


@dataclass(frozen=True)
class _Held:
    """The values of variables that an object holds."""

    digest: int


class Changes:
    """The changes of callbacks since training started.

    Example:

    ```python
    changes = Changes({"WarmUp": warm_up}, model)
    ...  # `warm_up` counts batches in `self.seen`
    changes.capture(arrays, "callbacks/")  # {"WarmUp": [[["seen"], 12]]}
    ```

    Args:
        callbacks: By name, after their `on_train_begin`.
        model: The model in training, whose variables are not a callback's.
    """

    def __init__(
        self, callbacks: Mapping[str, keras.callbacks.Callback], model: keras.Model
    ) -> None:
        self._callbacks = callbacks
        self._model = model
        self._started = tuple(clock() for clock in _CLOCKS)
        self._known: set[int] = set()
        self._note_known()
        self._marks: dict[str, dict[Path, Any]] = {}
        self._names = [*callbacks, _MODEL]
        self._owners: dict[str, frozenset[Path]] = {}
        self._lost: dict[str, None] = {}
        self._timed = {
            name
            for name, callback in callbacks.items()
            if callback_places.mentions(callback, _CLOCK_NAMES)
        }
        for name in self._names:
            owners: Owners = {}
            found = self._places(name, owners)
            self._marks[name] = {place.path: self._mark(place.value) for place in found}
            self._owners[name] = frozenset(owners)

    def unsound(self) -> list[str]:
        """Returns what of the callbacks a resumed run cannot restore, as known from their start."""
        lines = []
        for name, callback in self._callbacks.items():
            if not callback_places.is_of_script(type(callback)):
                continue
            lines += [
                f"{name}.{place.title}: the position of {what} cannot be saved"
                for place in self._places(name, {})
                if not place.is_global and (what := _positioned(place.value))
            ]
            stops = callback_places.mentions(callback, frozenset({"stop_training"}))
            if stops and callback_places.mentions(callback, _TIME_NAMES):
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
            found = list(self._changed(name))
            lost = [place for place, is_savable in found if not is_savable]
            owner = self._callbacks.get(name, self._model)
            if callback_places.is_of_script(type(owner)):  # libraries make their bars again
                titles = (f"{name}.{each.title} ({type(each.value).__name__})" for each in lost)
                self._lost.update(dict.fromkeys(titles))
            has_new = bool(lost) or any(self._is_new_bar(name, place) for place, _ in found)
            states: list[Any] = []
            for place, is_savable in found:
                # A flag may say that there is an object which could not be saved.
                if is_savable and not (has_new and isinstance(place.value, bool)):
                    key = f"{prefix}{name}/changed/{len(states)}"
                    states.append([list(place.path), self._encode(place.value, arrays, key)])
            if states:
                changed[name] = states
        return changed

    def _is_new_bar(self, name: str, place: Place) -> bool:
        is_old = isinstance(self._marks[name].get(place.path), _Bar)
        return progress_bars.is_bar(place.value) and not is_old

    def _changed(self, name: str) -> Iterator[tuple[Place, bool]]:
        """Values that have changed, and whether they can be saved."""
        marks, owners = self._marks[name], self._owners[name]
        clocks: Sequence[tuple[float, float]] = ()
        if name in self._timed:
            now = (clock() for clock in _CLOCKS)
            clocks = tuple(zip(self._started, now, strict=True))
        for place in self._places(name, {}):
            mark = self._mark(place.value)
            is_changed = place.path not in marks or marks[place.path] != mark
            if not is_changed or _is_reading(place.value, clocks):
                continue
            if isinstance(mark, _Unsavable):
                if not place.is_global:
                    yield place, False
            elif isinstance(mark, _Held) and not isinstance(marks.get(place.path), _Held):
                yield place, False  # an object that is made during training
            else:
                yield place, True
                if place.path[:-1] and not _is_there(place.path, marks, owners):
                    yield place, False  # a part of such an object

    def restore(
        self, states: Mapping[str, Sequence[Any]], arrays: Mapping[str, np.ndarray]
    ) -> list[str]:
        """Restores what `capture` returned. Returns the attributes that no longer exist."""
        self._note_known()
        missing = []
        for name in self._names:
            owners: Owners = {}
            places = {place.path: place for place in self._places(name, owners)}
            for segments, encoded in states.get(name, ()):
                path = tuple(segments)
                place = places.get(path)
                if progress_bars.is_position(encoded):
                    if place is not None and progress_bars.is_bar(place.value):
                        progress_bars.seek(place.value, encoded)
                    continue  # a bar that is made later starts at zero
                try:
                    if place is not None:
                        self._put(place, encoded, arrays)
                    else:
                        owners[path[:-1]](path[-1], plain_values.decode(encoded, arrays))
                except (LookupError, TypeError, ValueError, AttributeError):
                    missing.append(f"{name}.{callback_places.title_of(path)}")
        return missing

    def _put(self, place: Place, encoded: Any, arrays: Mapping[str, np.ndarray]) -> None:
        if isinstance(encoded, dict) and _GENERATOR in encoded:
            if not object_states.is_generator(place.value):
                raise LookupError("it is no generator")
            object_states.put(place.value, encoded[_GENERATOR])
            return
        value = plain_values.decode(encoded, arrays)
        if (variables := self._own_variables(place.value)) is not None:
            for variable, each in zip(variables, value, strict=True):
                variable.assign(each)
            return
        made = plain_values.put(place.value, value)
        if made is not place.value:
            place.put(made)

    def _places(self, name: str, owners: Owners) -> list[Place]:
        if name == _MODEL:
            owners[()] = functools.partial(setattr, self._model)
            return callback_places.places_set_on(
                self._model,
                self._callbacks.values(),
                by_itself=compat_model.runs_eagerly(self._model),
            )
        callback = self._callbacks[name]
        others = [each for each in self._callbacks.values() if each is not callback]
        return callback_places.places_of(callback, [self._model, *others], owners)

    def _note_known(self) -> None:
        self._known = {id(each) for each in compat_model.all_variables(self._model)}

    def _own_variables(self, value: Any) -> list[Any] | None:
        variables = callback_places.variables_of(value)
        if variables is None:
            return None
        return [each for each in variables if id(each) not in self._known]

    def _encode(self, value: Any, arrays: dict[str, Any], key: str, *, copies: bool = True) -> Any:
        if progress_bars.is_bar(value):
            return progress_bars.encode(value)
        if object_states.is_generator(value):
            return {_GENERATOR: object_states.encode(value)}
        variables = self._own_variables(value)
        encoder = plain_values.Encoder(arrays, np.array if copies else np.asarray)
        return encoder.encode(value if variables is None else variables, key)

    def _mark(self, value: Any) -> Any:
        """Returns what is another one once the value has changed."""
        if type(value) in (bool, int, float, str, type(None)):
            return type(value), value
        if progress_bars.is_bar(value):
            return _Bar(value.n)
        arrays: dict[str, np.ndarray] = {}
        try:
            digest = xxhash.xxh3_64(json.dumps(self._encode(value, arrays, "", copies=False)))
        except Exception:  # noqa: BLE001 (or it is an object that raises when it is looked at)
            return _Unsavable(type(value).__name__, id(value))
        for array in arrays.values():
            digest.update(repr((array.shape, object_states.mark_of_array(array))))
        is_held = callback_places.variables_of(value) is not None
        return _Held(digest.intdigest()) if is_held else digest.intdigest()


def _positioned(value: Any) -> str | None:
    """Names what keeps its place where nothing can read it."""
    if isinstance(value, io.IOBase):
        return "an open file" if not value.closed and value.writable() else None
    return "an iterator" if isinstance(value, Iterator) else None


def _is_there(path: Path, marks: Mapping[Path, Any], owners: frozenset[Path]) -> bool:
    """Returns whether the owner of a value was there at the start."""
    owner = path[:-1]
    return path in marks or owner in owners or owner[-1] in ("<closure>", "<global>")


def _is_reading(value: Any, clocks: Sequence[tuple[float, float]]) -> bool:
    """Returns whether a value is what a clock of this process has said."""
    if type(value) not in (int, float):
        return False
    unit = 1e9 if type(value) is int else 1.0
    return any(start * unit <= value <= now * unit for start, now in clocks)
