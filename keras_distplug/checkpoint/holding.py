"""Ownership of a run's folder, which the chief holds during a `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import keras

from keras_distplug.backend.tensorflow.runtime import failures
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached, detach
from keras_distplug.backend.tensorflow.runtime.callback_list import Calling
from keras_distplug.cluster import leaving
from keras_distplug.core.errors import FencedError
from keras_distplug.core.log import announce
from keras_distplug.core.threads import run_in_daemon, within
from keras_distplug.storage import ownership
from keras_distplug.storage.files import Files
from keras_distplug.storage.store import CheckpointStore

_LAST_SECS = 5.0  # limit for a release, even if the storage hangs


class Background(Protocol):
    """Saves that may be in progress."""

    @property
    def is_busy(self) -> bool: ...

    def await_idle(self) -> None: ...


class Hold:
    """Owns a folder while a `fit` uses it. Has no effect before `claimed`.

    Args:
        files: The folder.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self.ownership: ownership.Ownership | None = None
        self._saves: Callable[[], list[Background]] = list
        self._on_failure: Callable[[], None] = lambda: None
        self._is_in_fit = False
        failures.when_fit_ends(_give_up)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes this process the owner of the folder; releases it again if the body fails.

        Raises:
            InUseError: If another training uses it.
        """
        self.ownership = ownership.claim(self._files, announce)
        try:
            yield
        except BaseException:
            self.release()
            raise

    def start(
        self,
        model: keras.Model,
        saves: Callable[[], list[Background]],
        on_failure: Callable[[], None],
    ) -> None:
        """Keeps the folder until `release`, or until the `fit` of `model` has failed.

        Args:
            model: The model.
            saves: Returns the saves that a release waits for.
            on_failure: Called if the `fit` fails.
        """
        if self.ownership is not None:
            self._watch(self.ownership, Calling.now(), saves)
        self._saves, self._on_failure = saves, on_failure
        self._is_in_fit = True
        attach(model, self)

    def _watch(
        self,
        owned: ownership.Ownership,
        fit: Calling | None,
        saves: Callable[[], list[Background]],
    ) -> None:
        if fit is None:
            owned.is_training = lambda: True
            return
        owned.is_training = fit.is_running
        owned.is_idle = lambda: not (fit.is_running() or any(each.is_busy for each in saves()))

    def release(self) -> None:
        """Lets other trainings use the folder."""
        self._is_in_fit = False
        if self.ownership is not None:
            self.ownership.is_training = lambda: False
            self.ownership.release()
            self.ownership = None

    def delete(self, store: CheckpointStore) -> None:
        """Deletes the run, and the folder if it held nothing else.

        Raises:
            FencedError: If another process has taken it over; nothing is deleted then.
        """
        if self.ownership is None:
            return
        try:
            self.ownership.require_recent()
            store.delete_run()
            self.ownership.remove()
        except FencedError:
            leaving.is_fenced()
            raise

    @contextlib.contextmanager
    def given_up_on_failure(self) -> Iterator[None]:
        """Releases the folder if the body fails, within `fit` or before it."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Releases the folder of a failed `fit`, once no save is in progress."""
        if self._is_in_fit:
            self._is_in_fit = False
            self._on_failure()
        if self.ownership is None:
            return
        owned, uses, saves = self.ownership, self.ownership.uses, self._saves()

        def release() -> None:
            for each in saves:
                each.await_idle()
            owned.release(after_uses=uses)

        owned.is_training = lambda: False
        if any(each.is_busy for each in saves):
            run_in_daemon(release, "keras_distplug-release")
        else:
            with contextlib.suppress(TimeoutError):
                within(_LAST_SECS, lambda: owned.release(uses), "keras_distplug-release")
        self.ownership = None


def _give_up(model: keras.Model) -> None:
    hold = attached(model, Hold)
    if hold is not None:
        detach(model, Hold)
        hold.give_up()
