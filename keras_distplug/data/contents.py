"""Fingerprints of training samples: a few bytes that distinguish them from other samples.

Small data is hashed completely, and its order separately; of large data, evenly spread rows.
"""

from __future__ import annotations

import functools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, ParamSpec

import keras
import numpy as np
import tensorflow as tf
import xxhash

from keras_distplug.backend.tensorflow.input import epochs, pipeline, readers
from keras_distplug.backend.tensorflow.runtime.attached import ATTACHED
from keras_distplug.data.position import Positioned
from keras_distplug.python_state import random_states

CONTENTS, ORDER = "contents", "order"  # in a fingerprint; also "contents of y", for example
_WHOLE_BYTES, _WHOLE_ROWS = 4 * 2**20, 200_000
_SAMPLED_BYTES, _SAMPLED_ROWS = 16 * 2**20, 1_000
_PARTS = ("x", "y", "sample_weight")
_DEPTH, _MOST_OBJECTS = 3, 10_000  # limits within a user's data set

_NO_ROWS = np.zeros(0, np.uint64)

_P = ParamSpec("_P")
Columns = Mapping[str, Sequence[Any]]
"""Arrays by the part of the data that they belong to."""


def _or_unknown(function: Callable[_P, Mapping[str, str]]) -> Callable[_P, Mapping[str, str]]:
    """Makes `function` return nothing for data it cannot read: training may be able to."""

    @functools.wraps(function)
    def found(*args: _P.args, **kwargs: _P.kwargs) -> Mapping[str, str]:
        try:
            return function(*args, **kwargs)
        except Exception:  # noqa: BLE001 (arrays of other libraries may raise anything)
            return {}

    return found


@_or_unknown
def fingerprint_fit() -> Mapping[str, str]:
    """Returns fingerprint entries for the data given to the current `fit`."""
    if (loop := epochs.get_loop()) is None:
        return {}
    if isinstance(loop.dataset, Positioned):
        return loop.dataset.source.contents
    if (arrays := loop.given_arrays) is not None:
        return fingerprint_arrays(arrays)
    if loop.is_dataset and (whole := loop.whole_dataset) is not None:
        return fingerprint_given(whole)
    if (given := loop.py_dataset) is not None:
        return fingerprint_object(given[0])
    return (
        {} if (loader := loop.torch_loader) is None else fingerprint_object(loader.loader.dataset)
    )


@_or_unknown
def fingerprint_given(x: Any, y: Any = None, sample_weight: Any = None) -> Mapping[str, str]:
    """Returns fingerprint entries for arguments of `distributed_fit`."""
    if isinstance(x, Positioned):
        return x.source.contents
    if isinstance(x, tf.data.Dataset):
        try:
            return fingerprint_pipeline(pipeline.read(x))
        except pipeline.UnreadableError:
            return {}
    if isinstance(x, keras.utils.PyDataset):
        return fingerprint_object(x)
    if readers.is_torch_loader(x):
        return fingerprint_object(x.dataset)
    return {} if callable(x) else fingerprint_arrays((x, y, sample_weight))


@_or_unknown
def fingerprint_arrays(given: Any) -> Mapping[str, str]:
    """Returns fingerprint entries; none for values that are not known to be arrays.

    Args:
        given: A tuple of `x`, `y` and `sample_weight`, or of fewer of them, possibly nested.
    """
    parts = given if isinstance(given, tuple) else (given,)
    columns = {
        name: [column for each in keras.tree.flatten(part) for column in _get_columns(each)]
        for name, part in zip(_PARTS, parts, strict=False)
        if part is not None
    }
    return _fingerprint(columns) if all(columns.values()) else {}


@_or_unknown
def fingerprint_pipeline(parts: pipeline.Pipeline) -> Mapping[str, str]:
    """Returns fingerprint entries for the tensors that the data is made from, and for the names of
    its files."""
    return _fingerprint({"": parts.constants()})


@_or_unknown
def fingerprint_object(given: Any) -> Mapping[str, str]:
    """Returns fingerprint entries for the arrays and lists of texts in the attributes of an object
    with samples."""
    columns = list(_held(given, _DEPTH, set()))
    # Hashed separately: an order that the object draws itself differs in every process.
    hashes = [_joined({int(each.shape[0]): [each]})[0] for each in columns]
    return {CONTENTS: _hash([each.encode() for each in hashes])} if hashes else {}


def _get_columns(value: Any) -> Iterator[Any]:
    if isinstance(value, tf.SparseTensor):
        yield from (value.indices, value.values)
    elif isinstance(value, tf.RaggedTensor):
        yield from (value.flat_values, *value.nested_row_splits)
    elif len(getattr(value, "shape", ())) and (hasattr(value, "__getitem__") or _is_scipys(value)):
        yield value


def _held(given: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if id(given) in seen or depth < 0 or len(seen) > _MOST_OBJECTS:
        return
    seen.add(id(given))
    torch = random_states.imported_torch()
    if hasattr(given, "iloc"):  # a pandas object
        yield given
    elif isinstance(given, np.ndarray) or (torch is not None and isinstance(given, torch.Tensor)):
        if len(given.shape):
            yield given
    elif isinstance(given, list | tuple):
        if given and all(isinstance(each, str | os.PathLike) for each in given):
            yield np.array([os.fspath(each) for each in given], object)
        elif given and all(isinstance(each, int | float) for each in given):
            yield np.array(given)
        elif len(given) > _SAMPLED_ROWS and all(map(_is_plain, given)):
            yield np.array([repr(each) for each in given], object)
        elif len(given) <= _SAMPLED_ROWS:
            for each in given:
                yield from _held(each, depth - 1, seen)
    elif isinstance(given, dict):
        for each in islice(given.values(), _SAMPLED_ROWS):
            yield from _held(each, depth - 1, seen)
    elif not isinstance(given, type) and hasattr(given, "__dict__") and not callable(given):
        for name in sorted(vars(given).keys() - {ATTACHED}):
            yield from _held(vars(given)[name], depth - 1, seen)


def _is_plain(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, str | int | float) for each in value)


def _fingerprint(columns: Columns) -> Mapping[str, str]:
    """Hashes rows across all columns of the same length, since labels belong to their samples."""
    entries: dict[str, str] = {}
    by_length: dict[int, list[Any]] = defaultdict(list)
    is_whole = True
    for name, given in columns.items():
        alone: dict[int, list[Any]] = defaultdict(list)
        for each in given:
            length = int(each.shape[0])
            alone[length].append(each)
            by_length[length].append(each)
        if len(columns) > 1:
            entries[f"{CONTENTS} of {name}"] = _joined(alone)[0]
    if not by_length:
        return {}
    entries[CONTENTS], entries[ORDER], is_whole = _joined(by_length)
    if not is_whole:
        del entries[ORDER]  # already part of the contents
    return entries


def _joined(by_length: Mapping[int, Sequence[Any]]) -> tuple[str, str, bool]:
    unordered: list[bytes] = []
    ordered: list[bytes] = []
    all_whole = True
    for length, columns in sorted(by_length.items()):
        is_whole = sum(map(_sum_bytes, columns)) <= _WHOLE_BYTES and length <= _WHOLE_ROWS
        if not is_whole:  # labels, indices: their order does not count here
            flat = [each for each in columns if _is_flat(each)]
            unordered += map(_sum_digest, flat)
            columns = [each for each in columns if not _is_flat(each)]
        hashes = _row_hashes(length, columns, is_whole=is_whole)
        ordered.append(hashes.tobytes())
        unordered.append((np.sort(hashes) if is_whole else hashes).tobytes())
        all_whole &= is_whole
    return _hash(unordered), _hash(ordered), all_whole


def _hash(digests: Sequence[bytes]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(digests))


def _is_flat(column: Any) -> bool:
    return len(column.shape) == 1 and np.asarray(_taken(column, np.array([0]))).dtype.kind in "iub"


def _sum_digest(column: Any) -> bytes:
    """Returns a digest that does not depend on the order of the numbers."""
    numbers = _taken(column, None).astype(np.int64).view(np.uint64)
    sums = [numbers.sum(), (numbers * numbers).sum(), (numbers * (numbers >> np.uint64(7))).sum()]
    return np.array([len(numbers), *sums], np.uint64).tobytes()


def _row_hashes(length: int, columns: Sequence[Any], *, is_whole: bool) -> np.ndarray:
    """Returns hashes of all rows across the columns, or of evenly spread rows."""
    places = None
    if not is_whole:
        row_bytes = max(1, sum(map(_sum_bytes, columns)) // length)
        count = min(length, _SAMPLED_ROWS, max(2, _SAMPLED_BYTES // row_bytes))
        places = np.unique(np.linspace(0, length - 1, count).astype(np.int64))
    hashes = [_hash_rows(_taken(each, places)) for each in columns]
    return hashes[0] if len(hashes) == 1 else _mixed(np.stack(hashes or [_NO_ROWS], 1))


def _hash_rows(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind in "OSU":
        texts = [_text(each) for each in array.ravel().tolist()]
        if array.ndim == 1:
            texts = _without_common_folder(texts)
        width = len(texts) // len(array) if len(array) else 0
        rows = [repr(texts[at * width : (at + 1) * width]).encode() for at in range(len(array))]
        return np.array([xxhash.xxh3_64_intdigest(each) for each in rows], np.uint64)
    if array.dtype.kind == "f":  # Keras computes in `floatx`
        array = array.astype(keras.config.floatx(), copy=False)
    width = math.prod(array.shape[1:]) * array.dtype.itemsize
    if width >= len(array):
        whole = memoryview(np.ascontiguousarray(array).tobytes())
        starts = range(0, width * len(array), width) if width else ()
        return np.array(
            [xxhash.xxh3_64_intdigest(whole[at : at + width]) for at in starts], np.uint64
        )
    data = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), width)
    words = np.zeros((len(array), -(-width // 8)), np.uint64)
    words.view(np.uint8)[:, :width] = data
    return _mixed(words)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Returns one hash per row, vectorized over all rows, which is faster than a call per row if
    there are many short ones. Mixes like the finalizer of MurmurHash3."""
    found = np.full(len(words), words.shape[1], np.uint64)
    for column in words.T:
        found = (found ^ column) * np.uint64(0xFF51AFD7ED558CCD)
        found = (found ^ (found >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        found ^= found >> np.uint64(33)
    return found


def _sum_bytes(column: Any) -> int:
    known = getattr(column, "nbytes", None)
    if isinstance(known, int):
        return known
    dtype = getattr(column, "dtype", None)
    size = getattr(dtype, "size", None) or getattr(dtype, "itemsize", None) or 8
    return int(np.prod(column.shape)) * int(size)


def _is_scipys(value: Any) -> bool:
    return hasattr(value, "tocsr") and hasattr(value, "toarray")


def _taken(column: Any, places: np.ndarray | None) -> np.ndarray:
    if hasattr(column, "detach"):  # a torch tensor
        column = column.detach().cpu()
    if hasattr(column, "iloc"):
        column = column.to_numpy() if places is None else column.iloc[places].to_numpy()
        return np.asarray(column)
    if _is_scipys(column):
        rows = column.tocsr()
        return np.asarray((rows if places is None else rows[places]).toarray())
    if isinstance(column, tf.Tensor):
        with tf.device("CPU:0"):
            return np.asarray(column if places is None else tf.gather(column, places))
    if places is None:
        return np.asarray(column)
    if isinstance(column, np.ndarray):
        return np.asarray(column[places])
    return np.stack([np.asarray(column[int(place)]) for place in places])


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _without_common_folder(texts: list[str]) -> list[str]:
    """Removes the common folder: data may be in another folder after a restart, for example on a
    node's own disk."""
    first, last = min(texts, default=""), max(texts, default="")
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    )
    cut = max(first.rfind("/", 0, same), first.rfind("\\", 0, same)) + 1
    return [each[cut:] for each in texts]
