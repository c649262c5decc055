"""Ownership of a directory: only one process at a time, its owner, writes there.

    <directory>/.owner/
      0003.json           a claim: the process that made it
      0003.7d1f....beat   its heartbeat: an increasing number
      0003.released       its training has ended

Claims are numbered and created exclusively. The process with the highest number is the owner; a
process that finds a higher number than its own has lost the directory and saves nothing more. The
owner deletes old claims. A claim without its heartbeat file has lost, too, so that numbers may
start again in a folder that was deleted.

An owner on this machine is alive if its process exists. An owner elsewhere is alive if its
heartbeat changes, as measured by the clock of the process that checks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from keras_distplug.core.errors import CheckpointError, FencedError, InUseError, SaveError
from keras_distplug.core.hints import require_types
from keras_distplug.core.operating_system import unsuspended_s
from keras_distplug.core.process import Process, is_alive, this_process
from keras_distplug.core.threads import call_before_threads_end, within
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files, remedy

FOLDER = ".owner"
_DIRECTORY = "directory"  # in a claim: the directory's name for its owner
_LAST_SECS = 5.0
_CLAIM = re.compile(r"(\d{4,})\.json")


@dataclass(frozen=True)
class Timing:
    """The intervals by which a dead owner is detected.

    Args:
        beat_secs: Seconds between two heartbeats. Defaults to 10.
        stale_secs: Seconds without a heartbeat after which an owner on another machine counts as
            dead. Defaults to 60.
        look_secs: Seconds between two checks of its heartbeat. Defaults to 0.5.
    """

    beat_secs: float = 10.0
    stale_secs: float = 60.0
    look_secs: float = 0.5


TIMING = Timing()


class Ownership:
    """A claim of this process, created by `claim`.

    Args:
        files: The directory.
        number: The number of the claim.
        here: This process.
        timing: The intervals by which a dead owner is detected.
    """

    def __init__(self, files: Files, number: int, here: Process, timing: Timing) -> None:
        self._files = files
        self._number = number
        self._token = uuid.uuid4().hex
        claim = {**asdict(here), "token": self._token, _DIRECTORY: files.where()}
        self._text = json.dumps(claim, indent=1).encode()
        self._timing = timing
        self._beats = 0
        self.is_training: Callable[[], bool] = lambda: False  # true while a `fit` here uses it
        self.is_idle: Callable[[], bool] = lambda: False  # true once it and its saves have ended
        self.uses = 1  # the number of times this process has claimed it
        self._changing = threading.RLock()
        self._confirmed_s = unsuspended_s()
        self._released = threading.Event()

    def start_beating(self) -> None:
        thread = threading.Thread(
            target=self._keep_beating, name="keras_distplug-owner", daemon=True
        )
        thread.start()

    def require(self, max_age_secs: float = 0.0) -> None:
        """Checks that this process still owns the directory.

        Args:
            max_age_secs: Skip the check if one succeeded at most this many seconds ago. Defaults
                to 0: always check.

        Raises:
            FencedError: If another process owns it.
            CheckpointError: If the storage cannot be read.
        """
        checked_s = unsuspended_s()
        if checked_s - self._confirmed_s <= max_age_secs:
            return
        if not self._is_owner(layout.names(self._files, FOLDER)):
            self._end()
            raise FencedError(
                f"{self._files.where()} was taken over by {self._successor()}. This happens if "
                f"process {os.getpid()} of this training was suspended or cut off from the "
                f"storage, if a newer attempt has replaced it, or if {FOLDER} was deleted. This "
                "training will no longer save or delete anything. Do not restart it while the "
                "other process uses the folder."
            )
        self._confirmed_s = checked_s

    def require_recent(self) -> None:
        """Checks that this process still owns the directory, unless that was checked recently."""
        self.require(self._timing.stale_secs / 3)

    def use_again(self) -> bool:
        """Claims the directory for another use by this process. False if it was released."""
        with self._changing:
            self.uses += 1
            self.is_training = self.is_idle = lambda: False
            return not self.is_released

    def release(self, after_uses: int | None = None) -> None:
        """Releases the directory, so that other processes can claim it immediately.

        Args:
            after_uses: Release it only if the number of uses is still this. Defaults to `None`:
                release it in any case.
        """
        with self._changing:
            if self.is_released or after_uses not in (None, self.uses):
                return
            self._end()
            with contextlib.suppress(OSError):  # others will find it dead, or its heartbeat stale
                self._files.create(f"{FOLDER}/{self._number:04d}.released", [b""])

    def remove(self) -> None:
        """Deletes all claims, and the directory itself if it contains nothing else.

        Raises:
            FencedError: If another process owns it.
            CheckpointError: If deleting fails.
        """
        with self._changing:
            self.require()
            self._end()
            try:
                self._files.delete(FOLDER)
                self._files.delete_if_empty()
            except OSError as error:
                raise CheckpointError(
                    "Training has finished and its run was deleted, but "
                    f"{self._files.where(FOLDER)} could not be deleted: {error}. Delete it by hand."
                ) from error

    def _end(self) -> None:
        self._released.set()
        self.is_training = self.is_idle = lambda: False  # drop references to a model

    @property
    def is_released(self) -> bool:
        return self._released.is_set()

    def make(self) -> bool:
        """Creates the claim. Returns False if another process was faster.

        Raises:
            OSError: If the storage fails.
        """
        try:
            self._files.create(self._claim_file, [self._text])
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                # It is ours if only the storage's answer was lost.
                if self._files.read(self._claim_file) == self._text:
                    self.beat()
                    return self._is_owner(layout.names(self._files, FOLDER))
            return False
        self.beat()
        # Others may have reached higher numbers, and deleted this claim before it was created.
        if self._is_owner(layout.names(self._files, FOLDER)):
            return True
        self._end()
        for path in (f"{FOLDER}/{self._beat_file}", self._claim_file):
            self._files.delete(path)
        return False

    def beat(self) -> None:
        """Shows that this process is alive.

        Raises:
            OSError: If the storage fails.
        """
        with self._changing:
            if self.is_released:
                return
            self._beats += 1
            with tempfile.TemporaryDirectory(prefix="keras_distplug-") as folder:
                path = Path(folder) / "beat"
                # The size must not change: that of a file in a store is only requested once.
                path.write_text(f"{self._beats:012d}")
                self._files.put(path, f"{FOLDER}/{self._beat_file}", overwrite=True)

    def _keep_beating(self) -> None:
        while not self._released.wait(self._timing.beat_secs):
            uses = self.uses
            if self.is_idle():
                self.release(after_uses=uses)
                return
            try:
                self.beat()
            except OSError:
                continue  # a save will report it

    def _is_owner(self, names: list[str]) -> bool:
        newest = _newest(names)
        if not newest:  # the folder was deleted, or old files in it were purged
            try:
                self._files.create(self._claim_file, [self._text])
            except FileExistsError:
                newest = self._number
            except OSError as error:
                raise CheckpointError(
                    f"{self._files.where(self._claim_file)}, which marks the directory as in use, "
                    f"could not be written: {error}. Check the storage and its permissions."
                ) from error
            else:
                return True
        if newest != self._number:
            return False
        mine = f"{self._number:04d}."
        others = [n for n in names if n.startswith(mine) and n.endswith(".beat")]
        if others == [self._beat_file]:
            return True
        # In a folder that was deleted, numbers start again: compare the claim's token.
        _, token = _owner(self._files, newest)
        return token == self._token

    @property
    def _claim_file(self) -> str:
        return f"{FOLDER}/{self._number:04d}.json"

    @property
    def _beat_file(self) -> str:
        return _beat_file(self._number, self._token)

    def _successor(self) -> str:
        newest = _newest(layout.names(self._files, FOLDER))
        owner, _ = _owner(self._files, newest) if newest else (None, "")
        return "another process" if owner is None else str(owner)


def claim(
    files: Files,
    report: Callable[[str], None],
    *,
    here: Process | None = None,
    timing: Timing | None = None,
) -> Ownership:
    """Makes a process the owner of a directory.

    Args:
        files: The directory.
        report: Called with a message if it must wait.
        here: The process. Defaults to this one.
        timing: The intervals by which a dead owner is detected. Defaults to `TIMING`.

    Raises:
        InUseError: If another process owns it and is alive.
        SaveError: If the directory cannot be written.
        CheckpointError: If the directory cannot be read.
    """
    here = here or this_process()
    key = (os.getpid(), files.where())
    held = _held.get(key)
    if held is not None and not held.is_released and held.is_training():
        raise _in_use(files, here)
    if held is not None and held.use_again():
        return held  # left by a `fit` that was not started or has failed
    _release_at_exit()
    _held[key] = ownership = _win(files, report, here, timing or TIMING)
    return ownership


_held: dict[tuple[int, str], Ownership] = {}  # by process and directory: forks have their own


@functools.cache
def _release_at_exit() -> None:
    call_before_threads_end(_release_all)


def _release_all() -> None:
    """Releases all directories at exit, after saves in progress have ended."""
    for (pid, _), owned in list(_held.items()):
        # Even if it counts as released: another thread may still be writing that.
        if pid == os.getpid():
            with contextlib.suppress(TimeoutError, RuntimeError):
                within(_LAST_SECS, owned.release, "keras_distplug-release")


def _win(files: Files, report: Callable[[str], None], here: Process, timing: Timing) -> Ownership:
    has_reported = False
    while True:
        names = layout.names(files, FOLDER)
        newest = _newest(names)
        if newest and f"{newest:04d}.released" not in names:
            owner, token = _owner(files, newest)
            # This process's own earlier claims are released, even if the file says otherwise.
            alive = None if owner is None else owner != here and is_alive(owner, here)
            if alive and _is_copy(files, newest):
                alive = None
            if alive is None:
                if not has_reported:
                    report(_wait_message(files, owner, timing))
                    has_reported = True
                alive = _watch(files, newest, token, timing)
                if alive is None:
                    continue
            if alive:
                raise _in_use(files, owner)
        ownership = Ownership(files, newest + 1, here, timing)
        try:
            is_made = ownership.make()
        except OSError as error:
            raise SaveError(
                f"Nothing can be saved in {files.where()}: {error}. Check the storage, its "
                "permissions and its free space, or choose another folder."
            ) from error
        if is_made:
            _delete_older_claims(files, newest + 1)
            ownership.start_beating()
            return ownership


def _watch(files: Files, number: int, token: str, timing: Timing) -> bool | None:
    """Watches a heartbeat. Returns True once it changes, False if it is stale, or None if the claim
    was replaced by another one or released by its owner."""
    first: bytes | None = None
    started_s = unsuspended_s()
    while True:
        checked_s = unsuspended_s()
        names = layout.names(files, FOLDER)
        is_replaced = _newest(names) != number or _owner(files, number)[1] != token
        if is_replaced or f"{number:04d}.released" in names:
            return None
        beat = _read_beat(files, _beat_file(number, token), names)
        if first is None:
            first, started_s = beat, checked_s
        if beat != first:
            return True
        if checked_s - started_s >= timing.stale_secs:
            return False
        time.sleep(timing.look_secs)


def _beat_file(number: int, token: str) -> str:
    return f"{number:04d}.{token}.beat"


def _read_beat(files: Files, name: str, names: list[str]) -> bytes:
    if name not in names:
        return b""
    try:
        return files.read(f"{FOLDER}/{name}")
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise CheckpointError(
            f"{files.where(f'{FOLDER}/{name}')} cannot be read: {error}. {remedy(error)}"
        ) from error


def _delete_older_claims(files: Files, number: int) -> None:
    for name in layout.names(files, FOLDER):
        of = name.partition(".")[0]
        if of.isdecimal() and int(of) < number:
            try:
                files.delete(f"{FOLDER}/{name}")
            except OSError:
                continue  # an old claim does no harm


def _newest(names: list[str]) -> int:
    return max((int(match[1]) for match in map(_CLAIM.fullmatch, names) if match), default=0)


def _owner(files: Files, number: int) -> tuple[Process | None, str]:
    """Returns the process that made a claim, and the claim's token; None and "" if the claim cannot
    be read."""
    try:
        found = json.loads(files.read(f"{FOLDER}/{number:04d}.json"))
        token = str(found.pop("token"))
        found.pop(_DIRECTORY, None)
        owner = Process(**found)
        require_types(owner)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None, ""
    return owner, token


def _is_copy(files: Files, number: int) -> bool:
    """True if the claim was made for a directory of another name: this one is a copy of it."""
    try:
        where = json.loads(files.read(f"{FOLDER}/{number:04d}.json")).get(_DIRECTORY)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return where is not None and where != files.where()


def _in_use(files: Files, owner: Process | None) -> InUseError:
    is_of_pool = multiprocessing.parent_process() is not None
    in_parallel = " Calls of `fit` can share a folder if they run one after another, as with "
    in_parallel += "scikit-learn's n_jobs=1."
    return InUseError(
        f"Expected a folder that no other training job uses. Received: {files.where()}, in which "
        f"{owner or 'another process'} is already training. Wait until it has finished, "
        "stop it, or choose another folder for this one. Nothing was changed."
        f"{in_parallel if is_of_pool else ''}"
    )


def _wait_message(files: Files, owner: Process | None, timing: Timing) -> str:
    return (
        f"{files.where()} was last used by {owner or 'another process'}, which has not released "
        "it and may still be running on another machine: waiting up to "
        f"{timing.stale_secs:.0f} s for a sign of life"
    )
