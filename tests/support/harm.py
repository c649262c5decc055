"""Causes the faults of a job in its processes. Loads TensorFlow.

With parameter servers, only the chief trains: it causes the others' faults from outside.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import keras
import numpy as np
import tensorflow as tf
from support import fault
from support.fault import Fault
from support.where import own_name, workers

from keras_distplug.checkpoint import saver
from keras_distplug.storage import layout
from keras_distplug.storage.files import open_files
from keras_distplug.storage.stores.local import LocalFiles
from keras_distplug.storage.stores.remote import RemoteFiles

LONE = 99_991  # keys of a collective that no other worker calls
Array = np.ndarray


class Harm(keras.callbacks.Callback):  # type: ignore[misc]
    """Causes the faults of a job until FOLDER/enough exists.

    Args:
        folder: Folder of the job.
        batches: Number of batches in an epoch.
        replicas: Number of replicas per worker.
        directory: Directory of the checkpoints.
        storage_options: Options of their store.
        own_folder: Folder of this worker's local checkpoints.
        own: Functions for faults specific to the script, by kind.
    """

    def __init__(
        self,
        folder: Path,
        batches: int,
        replicas: int,
        directory: str | Path,
        storage_options: Mapping[str, Any] | None = None,
        own_folder: Path | None = None,
        own: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        super().__init__()
        self.faults = fault.read(folder)
        self.epoch = 0
        self._folder, self._batches, self._replicas = folder, batches, replicas
        self._directory, self._options = directory, dict(storage_options or {})
        self._own_folder = own_folder
        self._own = dict(own or {})
        self._who = own_name()
        self._steps: int | None = None  # position in the data; None before the first step
        _before_saving(lambda: self._come("saving"))

    # Times at which faults occur

    def on_fit_begin(self) -> None:
        """The script calls this before `fit`."""
        self._come("before fit")

    def on_train_begin(self, logs: Any = None) -> None:
        self._come("begin")
        if any(each.moment == "in a call" for each in self.faults):
            _before_calls(lambda number: self._come("in a call", number))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        is_first, self._steps = self._steps is None, self.epoch * self._batches + batch + 1
        if is_first and self._who in ("chief-0", "worker-0"):
            self._note(self._folder / fault.FIRST_BATCHES, -1)
        self._come("step")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._come("validation")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._come("epoch")

    def on_fit_end(self) -> None:
        """The script calls this after `fit`."""
        self._come("end")

    def on_input(self, number: int, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Changes a global batch of an epoch when it is created."""
        made = self.epoch * self._batches + number
        self._come("input", made)
        for index, each in enumerate(self.faults):
            if (each.moment, each.at_step) == ("data", made):
                self._note(self._folder / fault.FIRED, index)
                arrays = self._with_nan(arrays, each)
        return arrays

    def _with_nan(self, arrays: tuple[Array, ...], of: Fault) -> tuple[Array, ...]:
        replica = int(of.who.rpartition("-")[2]) * self._replicas
        place = ("x", "y", "weight").index(of.where)
        harmed = list(arrays)
        harmed[place] = harmed[place].copy()
        harmed[place][replica * len(harmed[place]) // (workers() * self._replicas)] = np.nan
        return tuple(harmed)

    # Faults

    def _come(self, moment: fault.Moment, made: int = 0) -> None:
        for index, each in enumerate(self.faults):
            is_here = each.moment == moment and self._is_here(each, made)
            if is_here and self._is_mine(each) and self._is_due(index):
                damages = each.kind in ("truncate", "flip")
                run, file = self._newest_file() if damages else ("", "")
                self._note(self._folder / fault.FIRED, index, file)
                if damages:
                    self._damage(each.kind, f"{run}/{file}")
                    os.kill(os.getpid(), signal.SIGKILL)
                self._do(each)

    def _is_here(self, each: Fault, made: int) -> bool:
        if each.moment == "step":
            return self._steps == each.at_step + 1
        if each.moment == "saving":
            return (self._steps or 0) > each.at_step
        if each.moment in ("validation", "epoch"):
            return each.at_step // self._batches == self.epoch
        return each.moment in ("before fit", "begin", "end") or each.at_step == made

    def _is_mine(self, each: Fault) -> bool:
        return each.who == self._who or (self._who == "chief-0" and each.kind in _FROM_OUTSIDE)

    def _is_due(self, index: int) -> bool:
        if (self._folder / "enough").exists():
            return False
        each = self.faults[index]
        came = {one.index for one in fault.fired(self._folder)}
        if index in came and not each.every_time:
            return False
        return set(range(index)) <= came if each.after is None else len(came) >= each.after

    def _note(self, file: Path, index: int, damaged: str = "") -> None:
        of = self.faults[index] if index >= 0 else None
        # Data is prefetched: all earlier batches will have been trained by then.
        steps = of.at_step if of is not None and of.moment == "input" else self._steps
        fault.note(file, fault.Came(index, time.time(), self._who, steps, damaged))

    def _do(self, each: Fault) -> None:
        if each.kind in _FROM_OUTSIDE:
            others = self._folder / f"pid-{each.who}"
            pid = os.getpid() if each.who == self._who else int(others.read_text())
            os.kill(pid, _FROM_OUTSIDE[each.kind] or each.number)
        elif each.kind == "abort":
            os.abort()
        elif each.kind == "error":
            raise RuntimeError("requested by the test")
        elif each.kind == "leave":
            sys.exit(0)
        elif each.kind == "vanish":
            os._exit(9)
        elif each.kind == "lose":
            assert self._own_folder is not None
            saver.wait_for_all()
            shutil.rmtree(self._own_folder)
            os.kill(os.getpid(), signal.SIGKILL)
        elif each.kind == "lock":
            ctypes.PyDLL(None).sleep(10_000)
        elif each.kind == "starve":
            threading.Event().wait()
        elif each.kind == "stray":
            # Separate keys: the strategy's own could be mistaken for the others' next call.
            tf.raw_ops.CollectiveReduceV2(
                input=tf.ones(()),
                group_size=max(2, workers()),
                group_key=LONE,
                instance_key=LONE,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
        elif each.kind == "slow":
            time.sleep(each.secs)
        elif each.kind == "fails_to_write":
            saver.wait_for_all()  # the running one has started earlier
            _refuse_shards(each.count, each.number)
        elif each.kind in self._own:
            self._own[each.kind]()
        else:
            assert each.kind == "flaky_store", each

    def _newest_file(self) -> tuple[str, str]:
        """Returns the run of the newest checkpoint, and the first of its files."""
        saver.wait_for_all()
        files = open_files(self._directory, self._options)
        [*_, (_, run)] = layout.runs(files)
        places = [place for place in layout.places(files, run) if place.kind == "step"]
        committed = [p for p in places if layout.MANIFEST in files.names(f"{run}/{p.name}")]
        fs, root = fsspec.core.url_to_fs(str(self._directory), **self._options)
        shard = min(fs.glob(f"{root}/{run}/{max(committed).name}/*/*.safetensors"))
        return run, "/".join(shard.split("/")[-3:])

    def _damage(self, how: str, file: str) -> None:
        fs, root = fsspec.core.url_to_fs(str(self._directory), **self._options)
        file = f"{root}/{file}"
        content = bytearray(fs.cat_file(file))
        if how == "truncate":
            del content[len(content) // 2 :]
        else:
            content[-1] ^= 1
        fs.pipe_file(file, bytes(content))


_FROM_OUTSIDE = {
    "kill": signal.SIGKILL,
    "crash": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "preempt": None,  # named by the fault
}


def _before_saving(come: Callable[[], None]) -> None:
    stock = saver.Saver.start

    def start(own: saver.Saver, *arguments: Any) -> None:
        stock(own, *arguments)
        come()

    mock.patch.object(saver.Saver, "start", start).start()


def _before_calls(come: Callable[[int], None]) -> None:
    numbers = itertools.count(1)

    def counted(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            come(next(numbers))
            return stock(*args, **kwargs)

        return call

    for name in ("fsync", "link", "unlink", "rmdir", "mkdir"):
        mock.patch.object(os, name, counted(getattr(os, name))).start()


def _refuse_shards(saves: int, number: int) -> None:
    """Lets saves fail from now on, until this many checkpoints are affected."""
    refused: set[str] = set()

    def refusing(stock: Callable[..., None]) -> Callable[..., None]:
        def create(own: Any, path: str, parts: Iterable[bytes | memoryview]) -> None:
            checkpoint = path.split("/")[-3]  # not for every retry
            if path.endswith(".safetensors") and (checkpoint in refused or len(refused) < saves):
                refused.add(checkpoint)
                raise OSError(number, os.strerror(number), path)
            stock(own, path, parts)

        return create

    for kind in (LocalFiles, RemoteFiles):
        mock.patch.object(kind, "create", refusing(kind.create)).start()
