"""A source that reads the batches of a torch `DataLoader`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from keras_distplug.backend.tensorflow.input import readers
from keras_distplug.data import contents
from keras_distplug.data.position import Source
from keras_distplug.data.reachable_state import ReachableState
from keras_distplug.data.sources import elements
from keras_distplug.python_state import random_states
from keras_distplug.python_state.object_states import Attributes

_MOST_PARTS = 1000
_GLOBAL = "global"
_REACHED = "reached"
_PERSISTENT = (
    "workers of a torch DataLoader with persistent_workers=True continue their random numbers from "
    "epoch to epoch, and these are not restored. If the dataset draws random numbers, use "
    "persistent_workers=False"
)
_BY_THE_CLOCK = (
    "a WebDataset shuffles by the clock unless it has a seed, so the interrupted epoch sees some "
    "samples twice and others not at all. Give its `shuffle` a `seed`, and `shardshuffle` another"
)


class LoaderData(Source):
    """A torch `DataLoader` of global batches.

    The position includes the state that determines its order and its samples: the random generators
    of torch, Python and NumPy, and the attributes of the loader, its samplers and its datasets.
    Resuming reads the earlier batches of the pass again, which draws the same numbers again.

    Args:
        reader: Keras' reader of the loader.
    """

    draws = True
    why_not_by_samples = "a torch DataLoader makes the batches"
    why_not_on_workers = "the torch DataLoader is in this process"

    def __init__(self, reader: readers.LoaderReader) -> None:
        self._reader = reader
        self._loader = reader.loader
        self._state = _State(self._loader)
        self.variables = (self._state,)
        self.whole = self._reader.dataset(lambda: iter(self._loader))

    @property
    def num_batches(self) -> int | None:
        return self._reader.num_batches

    def batches(
        self, passed: int, start: int, behind: int = 0, read: int | None = None
    ) -> tf.data.Dataset:
        given, noted = self._state.take()
        if given is not None and start == self.num_batches:
            self._state.restore(given)  # nothing is left to be read
            given = None

        def start_reading() -> Iterator[Any]:
            # Called for the first batch, possibly long after the iterator was made.
            if given is None:
                noted.update(self._state.capture())
                return islice(self._loader, start, None)
            return self._read_again(given, start)

        return self._reader.dataset(start_reading)

    def _read_again(self, state: Mapping[str, Any], start: int) -> Iterator[Any]:
        now = random_states.capture_python()
        self._state.restore(state)
        random_states.restore_python(state[_GLOBAL])
        batches = _skipped(self._loader, start)
        if random_states.capture_python() == state[_GLOBAL]:
            # The loader does not use them, but callbacks may have drawn since the pass started.
            random_states.restore_python(now)
        return batches

    def _described(self) -> Mapping[str, Any]:
        return {
            "kind": "torch DataLoader",
            "dataset": type(self._loader.dataset).__name__,
            "sampler": type(self._loader.sampler).__name__,
            "batches": self.num_batches,
            "elements": elements(self.whole),
        }

    holds_state = True

    @functools.cached_property
    def contents(self) -> Mapping[str, str]:
        return contents.fingerprint_object(self._loader.dataset)

    def warnings(self) -> list[str]:
        return [
            *self._state.reachable.warnings(),
            *([_PERSISTENT] if self._loader.persistent_workers else []),
            *([_BY_THE_CLOCK] if _is_shuffled_by_the_clock(self._loader.dataset) else []),
        ]


def _skipped(loader: Any, batches: int) -> Iterator[Any]:
    """Returns the iterator of a loader after some batches. Their samples are read, since that may
    draw random numbers, but torch's own collate functions are skipped: they draw none."""
    torch = random_states.imported_torch()
    usual = loader.collate_fn
    draws_none = (torch.utils.data.default_collate, torch.utils.data.default_convert)
    left = 0 if loader.num_workers or usual not in draws_none else batches

    def collate(samples: Any) -> Any:
        nonlocal left
        if not left:
            return usual(samples)
        left -= 1
        return None

    loader.collate_fn = collate
    try:
        iterator: Iterator[Any] = iter(loader)
    finally:
        loader.collate_fn = usual
    for _ in islice(iterator, batches):
        pass
    return iterator


class _State:
    """The state that determines which batches a loader yields next."""

    def __init__(self, loader: Any) -> None:
        parts = _parts(loader)
        own = {name: Attributes(part) for name, part in parts.items()}
        self.reachable = ReachableState(
            loader.dataset, {**parts, "collate_fn": loader.collate_fn}, own
        )
        self._parts: dict[str, Attributes | ReachableState] = {
            **own,
            # The loader's other attributes are settings.
            "loader": Attributes(SimpleNamespace(generator=loader.generator)),
            _REACHED: self.reachable,
        }
        self._latest: dict[str, Any] = {}  # the last result of `read`
        self._given: Mapping[str, Any] | None = None  # for the pass to continue

    def read(self) -> dict[str, Any]:
        self._latest = self.capture()
        return self._latest

    def capture(self) -> dict[str, Any]:
        """Does the same as `read`, without recording the result."""
        parts = {name: part.read() for name, part in self._parts.items()}
        return {_GLOBAL: random_states.capture_python(), **parts}

    def assign(self, value: Mapping[str, Any], *, in_pass: bool) -> None:
        if in_pass:
            self._given = value
        else:
            self.restore(value)

    def take(self) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
        """Returns a new iterator's start: the state to restore, if any, and the last `read`."""
        given, self._given = self._given, None
        return given, self._latest

    def restore(self, value: Mapping[str, Any]) -> None:
        """Restores a state from `read`, except the global generators, which the process owns."""
        for name, part in self._parts.items():
            if name in value:
                part.assign(value[name])


def _parts(loader: Any) -> dict[str, Any]:
    """Returns the samplers and datasets that a loader reads, by their place in it."""
    torch = random_states.imported_torch()
    kinds = (torch.utils.data.Dataset, torch.utils.data.Sampler)
    found: dict[str, Any] = {}
    left = [(n, getattr(loader, n)) for n in ("dataset", "sampler", "batch_sampler")]
    while left and len(found) < _MOST_PARTS:
        name, part = left.pop(0)
        if isinstance(part, list | tuple) and len(part) <= _MOST_PARTS:
            left += [(f"{name}.{number}", each) for number, each in enumerate(part)]
        elif isinstance(part, kinds) and not any(part is each for each in found.values()):
            found[name] = part
            left += [(f"{name}.{attribute}", each) for attribute, each in vars(part).items()]
    return found


def _is_shuffled_by_the_clock(dataset: Any) -> bool:
    """Returns True if stages of a WebDataset shuffle without a seed."""
    stages = [stage for stage in getattr(dataset, "pipeline", ()) if hasattr(stage, "kw")]
    shuffles = [s for s in stages if getattr(s.f, "__name__", "") == "_shuffle"]
    return any(stage.kw.get("seed") is None for stage in shuffles)
