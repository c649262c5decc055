"""The state of Keras' callbacks that influences how training continues.

Keras 3.10 to 3.15 have no API to save and restore it (keras-team/keras#14862), and some of it is in
private attributes. Values that a callback derives from its arguments are not saved: restoring the
sign of `min_delta`, for example, would flip it twice.
"""

from __future__ import annotations

import os
import shutil
import socket
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras

_SAVES = ("best", "_batches_seen_since_last_saving", "_last_batch_seen")
_ATTRIBUTES = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "ReduceLROnPlateau": ("wait", "cooldown_counter", "best"),
    "ModelCheckpoint": _SAVES,
    "OrbaxCheckpoint": (*_SAVES, "_total_batches_seen"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch"),
}
_ROWS, _EVENTS = "bytes_of_rows", "bytes_of_events"
_RUNS = ("train", "validation")  # subfolders of TensorBoard's `log_dir`


# Callbacks whose work may require all workers, with the attribute that holds their path.
_PLACES = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}
_DECIDING = (
    *("BackupAndRestore", "EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau"),
    *("SwapEMAWeights", "TerminateOnNaN"),
)


def find_place(callback: keras.callbacks.Callback) -> str | None:
    """Returns the name of the attribute that holds the path of a file-writing Keras callback or a
    subclass; None for any other callback."""
    kinds = (name for name in _PLACES if isinstance(callback, getattr(keras.callbacks, name)))
    return next((_PLACES[name] for name in kinds), None)


def decides(callback: keras.callbacks.Callback) -> bool:
    """True if the callback, or its base class in Keras, influences training."""
    return isinstance(callback, tuple(getattr(keras.callbacks, name) for name in _DECIDING))


def get_callback_state(callback: keras.callbacks.Callback) -> dict[str, Any] | None:
    """Returns the state of a Keras callback or a subclass; None for any other callback."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        return {_ROWS: _size(callback.filename)}
    names = get_attributes(callback)
    state = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
    if isinstance(callback, keras.callbacks.TensorBoard) and (sizes := _sizes_of_events(callback)):
        state[_EVENTS] = sizes
    return state or None


def set_state(
    callback: keras.callbacks.Callback, state: Mapping[str, Any], *, epoch: int, is_anew: bool
) -> None:
    """Restores a state from `get_callback_state`. Call it after the callback's `on_train_begin`.

    Args:
        callback: The callback.
        state: A result of `get_callback_state`.
        epoch: The next epoch.
        is_anew: True if training had been stopped there and is now continued anyway: the exhausted
            patience is reset.
    """
    if isinstance(callback, keras.callbacks.CSVLogger):
        _cut(callback, state[_ROWS], epoch)
        return
    for name in get_attributes(callback):
        if name in state:
            setattr(callback, name, state[name])
    if isinstance(callback, keras.callbacks.TensorBoard):
        for name, size in state.get(_EVENTS, {}).items():
            _cut_events(os.path.join(callback.log_dir, name), size)
    if is_anew and isinstance(callback, keras.callbacks.EarlyStopping):
        callback.wait = callback.stopped_epoch = 0


def spare_files(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.CSVLogger]:
    """Prevents the loggers among `callbacks` from emptying their files in their `on_train_begin`.

    Returns:
        The loggers that would have done so. Call `set_state` or `empty` for every one of them.
    """
    spared = []
    for callback in callbacks:
        is_logger = isinstance(callback, keras.callbacks.CSVLogger)
        # A file that is not local cannot be truncated, so Keras starts it from scratch.
        if is_logger and not callback.append and os.path.isfile(callback.filename):
            callback.append = True
            spared.append(callback)
    return spared


def empty(logger: keras.callbacks.CSVLogger) -> None:
    """Empties the file of a logger that `spare_files` has spared."""
    logger.csv_file.truncate(0)
    logger.append_header = True


def get_attributes(callback: keras.callbacks.Callback) -> tuple[str, ...]:
    """Returns the names of the attributes that hold the state of a Keras callback."""
    for name, attributes in _ATTRIBUTES.items():
        # Keras 3.10 has no OrbaxCheckpoint.
        if isinstance(callback, getattr(keras.callbacks, name, ())):
            return attributes
    return ()


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _cut(logger: keras.callbacks.CSVLogger, rows_bytes: int, epoch: int) -> None:
    """Removes the rows of epochs that will be trained again from the file."""
    if _size(logger.filename) <= rows_bytes:
        return
    with open(logger.filename, "rb") as file:
        file.seek(rows_bytes)
        first = file.readline().decode(errors="replace").split(logger.sep)[0]
    if first not in ("epoch", str(epoch)):
        warnings.warn(
            f"Expected the CSVLogger file {logger.filename} to continue with epoch {epoch} "
            "(counted from 0), from which training resumes. Received: other rows. These rows are "
            "kept, and those of the resumed epochs are appended after them.",
            stacklevel=2,
        )
        return
    logger.csv_file.truncate(rows_bytes)
    logger.append_header = rows_bytes == 0


def _sizes_of_events(callback: keras.callbacks.TensorBoard) -> dict[str, int]:
    """Flushes the files that TensorBoard writes in this process, and returns their sizes in bytes,
    by path relative to `log_dir`."""
    for writer in getattr(callback, "_writers", {}).values():
        writer.flush()
    own = f".{socket.gethostname()}.{os.getpid()}."  # every file has it in its name
    sizes = {}
    for run in _RUNS:
        folder = os.path.join(callback.log_dir, run)
        if os.path.isdir(folder):
            names = [name for name in os.listdir(folder) if ".tfevents." in name and own in name]
            sizes.update({f"{run}/{name}": _size(os.path.join(folder, name)) for name in names})
    return sizes


def _cut_events(path: str, size: int) -> None:
    """Removes the points of batches that will be trained again from a TensorBoard file."""
    if _size(path) <= size:
        return
    # A new file under that name: a writer that still has the old file open does not write to it.
    cut = f"{path}.cut"
    shutil.copyfile(path, cut)
    os.truncate(cut, size)
    shutil.copymode(path, cut)
    os.replace(cut, path)
