"""The state of Keras' callbacks that decides how training goes on.

Keras 3.10 to 3.15 have no means to take it from a callback and to give it back
(keras-team/keras#14862), and some of it is in private attributes. What a callback works out anew
from its arguments is left out: to put back the sign of `min_delta` would turn it twice.
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
_RUNS = ("train", "validation")  # folders of TensorBoard in its `log_dir`


# Whose work may take all workers, and where it goes.
_PLACES = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}
_DECIDING = (
    *("BackupAndRestore", "EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau"),
    *("SwapEMAWeights", "TerminateOnNaN"),
)


def place_of(callback: keras.callbacks.Callback) -> str | None:
    """The attribute that says where a callback of Keras that writes files, or one derived of it,
    writes them; None if it is no such callback."""
    kinds = (name for name in _PLACES if isinstance(callback, getattr(keras.callbacks, name)))
    return next((_PLACES[name] for name in kinds), None)


def decides(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback of Keras, or one derived of it, has a say in how training goes on."""
    return isinstance(callback, tuple(getattr(keras.callbacks, name) for name in _DECIDING))


def state_of(callback: keras.callbacks.Callback) -> dict[str, Any] | None:
    """What a callback of Keras, or one derived of it, knows; None if it is no such callback."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        return {_ROWS: _size(callback.filename)}
    names = attributes_of(callback)
    state = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
    if isinstance(callback, keras.callbacks.TensorBoard) and (sizes := _sizes_of_events(callback)):
        state[_EVENTS] = sizes
    return state or None


def set_state(
    callback: keras.callbacks.Callback, state: Mapping[str, Any], *, epoch: int, is_anew: bool
) -> None:
    """Gives back what `state_of` took. To be called behind the callback's `on_train_begin`.

    Args:
        callback: The callback.
        state: From `state_of`.
        epoch: The epoch that comes next.
        is_anew: True if training had been stopped there, and is asked to go on all the same: what
            has worn out patience then is forgotten.
    """
    if isinstance(callback, keras.callbacks.CSVLogger):
        _cut(callback, state[_ROWS], epoch)
        return
    for name in attributes_of(callback):
        if name in state:
            setattr(callback, name, state[name])
    if isinstance(callback, keras.callbacks.TensorBoard):
        for name, size in state.get(_EVENTS, {}).items():
            _cut_events(os.path.join(callback.log_dir, name), size)
    if is_anew and isinstance(callback, keras.callbacks.EarlyStopping):
        callback.wait = callback.stopped_epoch = 0


def spare_files(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.CSVLogger]:
    """Keeps the loggers among `callbacks` from emptying their files in their `on_train_begin`.

    Returns:
        The loggers that would have: `set_state` or `empty` has to be called for each then.
    """
    spared = []
    for callback in callbacks:
        is_logger = isinstance(callback, keras.callbacks.CSVLogger)
        # What is no file of this machine cannot be cut, so Keras begins it anew.
        if is_logger and not callback.append and os.path.isfile(callback.filename):
            callback.append = True
            spared.append(callback)
    return spared


def empty(logger: keras.callbacks.CSVLogger) -> None:
    """Empties the file of a logger that `spare_files` has spared."""
    logger.csv_file.truncate(0)
    logger.append_header = True


def attributes_of(callback: keras.callbacks.Callback) -> tuple[str, ...]:
    """Names of the attributes in which a callback of Keras keeps its state."""
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
    """Takes the rows of epochs that are trained again from the file."""
    if _size(logger.filename) <= rows_bytes:
        return
    with open(logger.filename, "rb") as file:
        file.seek(rows_bytes)
        first = file.readline().decode(errors="replace").split(logger.sep)[0]
    if first not in ("epoch", str(epoch)):
        warnings.warn(
            f"{logger.filename} of CSVLogger has other rows behind those of this run than the ones "
            f"from epoch {epoch} on, which is trained again. They stay; later ones follow them.",
            stacklevel=2,
        )
        return
    logger.csv_file.truncate(rows_bytes)
    logger.append_header = rows_bytes == 0


def _sizes_of_events(callback: keras.callbacks.TensorBoard) -> dict[str, int]:
    """Flushes the files that TensorBoard writes in this process, and returns their sizes by their
    names in `log_dir`."""
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
    """Removes the points of batches that are trained again from a file of TensorBoard."""
    if _size(path) <= size:
        return
    # Another file of that name: what still has the old one open does not write into this one.
    cut = f"{path}.cut"
    shutil.copyfile(path, cut)
    os.truncate(cut, size)
    shutil.copymode(path, cut)
    os.replace(cut, path)
