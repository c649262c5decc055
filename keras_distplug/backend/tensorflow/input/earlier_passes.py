"""Counts how often datasets were read before `fit` reads them.

A shuffle draws a new order for every iterator created from it, such as that of `layer.adapt(ds)` or
of an earlier `fit`, and its state cannot be read (TensorFlow 2.18 to 2.21). Therefore iterators are
counted from the import of this package or of TensorFlow on, whichever is later.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from keras_distplug.backend.tensorflow.runtime.attached import is_marked, mark
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(tensorflow="2.18 to 2.21")

_DATASETS = "tensorflow.python.data.ops.dataset_ops"
_MOST_DATASETS = 10_000
_paused = threading.local()
_counts: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def watch() -> None:
    """Starts counting, immediately or once TensorFlow is imported. Does not import it."""
    if (module := sys.modules.get(_DATASETS)) is not None:
        _count_iterators(module)
    elif "tensorflow" not in sys.modules and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def count_iterators(dataset: Any) -> list[tuple[int, int]]:
    """Returns, for every shuffle in `dataset` from its end on, the numbers of iterators that were
    created and of those that were read."""
    return [_counts.get(each, (0, 0)) for each in _chain(dataset) if _is_shuffle(each)]


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Excludes iterators created by this thread from the count."""
    _paused.count = getattr(_paused, "count", 0) + 1
    try:
        yield
    finally:
        _paused.count -= 1


def restore(dataset: Any, counts: Sequence[tuple[int, int]], *, or_more: bool = False) -> None:
    """Restores a result of `count_iterators` from another process.

    Args:
        dataset: The dataset.
        counts: The result of `count_iterators`.
        or_more: True to keep higher counts. Defaults to `False`.
    """
    shuffles = filter(_is_shuffle, _chain(dataset))
    for each, (made, read) in zip(shuffles, counts, strict=False):
        made_now, read_now = _counts.get(each, (0, 0)) if or_more else (0, 0)
        _counts[each] = (max(made, made_now), max(read, read_now))


def add(dataset: Any, made: int, read: int, *, least: tuple[int, int] = (0, 0)) -> None:
    """Counts iterators, possibly of another dataset that replaces this one.

    Args:
        dataset: The dataset.
        made: The number of iterators that were created.
        read: The number of iterators that were read.
        least: Lower bounds of both counts before the addition. Defaults to `(0, 0)`.
    """
    for each in _chain(dataset):
        before = map(max, _counts.get(each, (0, 0)), least)
        _counts[each] = (next(before) + made, next(before) + read)


def walk_upstream(dataset: Any) -> Iterator[Any]:
    """Yields `dataset` and all datasets that it was transformed from. It does not recurse, because
    chains can be long."""
    left = [dataset]
    while left:
        each = left.pop()
        yield each
        left += reversed(each._inputs())


def _chain(dataset: Any) -> Iterator[Any]:
    # Runs whenever a script iterates a dataset.
    return itertools.islice(walk_upstream(dataset), _MOST_DATASETS)


def _is_shuffle(dataset: Any) -> bool:
    return type(dataset).__name__ == "_ShuffleDataset"


def _count_iterators(module: ModuleType) -> None:
    kind = module.DatasetV2
    stock = kind.__iter__
    if is_marked(stock):
        return

    def __iter__(self: Any) -> Any:
        if not getattr(_paused, "count", 0):
            add(self, made=1, read=1)
        return stock(self)

    mark(__iter__)
    _UPSTREAM.patch(kind, "__iter__", __iter__)


class _Finder(MetaPathFinder):
    """An import hook that waits for the first import of the module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _DATASETS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._stock.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._stock
        self._stock.exec_module(module)
        _count_iterators(module)
