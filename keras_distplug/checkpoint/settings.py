"""Settings of `BackupAndRestore`, and the names of their fields as single arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from keras_distplug.checkpoint.cadence import Cadence, SaveFreq, get_cadence
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.values import ShortRepr
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.retention import Mode, Retention, require_count


@dataclass(frozen=True, repr=False)
class Saving(ShortRepr):
    """The limits of what saves may cost, and the consequences of a late or failed save.

    Example:

    ```python
    kd.BackupAndRestore("runs/mnist", save_freq="auto", saving=kd.Saving(max_overhead=0.05))
    ```

    Args:
        on_busy: If a save is due while another is in progress, `"skip"` it, or `"wait"` for the
            other. Defaults to `"skip"`. The save at the end of training always waits.
        max_overhead: With `save_freq="auto"`, the largest fraction of the time spent on saves.
            Defaults to 0.01.
        max_failed_saves: Training ends with an error after this many consecutive failed saves.
            Defaults to 3.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    on_busy: Literal["skip", "wait"] = "skip"
    max_overhead: float = 0.01
    max_failed_saves: int = 3

    def __post_init__(self) -> None:
        if self.on_busy not in ("skip", "wait"):
            raise ConfigurationError(
                f'Expected `on_busy` to be "skip" or "wait". Received: {self.on_busy!r}'
            )
        if not isinstance(self.max_overhead, float) or not 0 < self.max_overhead < 1:
            raise ConfigurationError(
                "Expected `max_overhead` to be a fraction between 0 and 1, such as 0.01. Received: "
                f"{self.max_overhead!r}"
            )
        require_count("max_failed_saves", self.max_failed_saves)


@dataclass(frozen=True, repr=False)
class Resuming(ShortRepr):
    """Settings for resuming: the allowed changes of the script, and the start of a new run.

    Example:

    ```python
    kd.BackupAndRestore("runs/mnist", resuming=kd.Resuming(restore_learning_rate=False))
    kd.defaults("runs/flowers", init_from="runs/imagenet")
    ```

    Args:
        allow_batch_change: Continue with the same data in global batches of another size, from the
            next sample on. Defaults to `False`, which refuses them.
        allow_data_change: Continue although the data differs from the checkpoint's: another global
            batch size, another pipeline, other samples. The interrupted epoch then starts again.
            Defaults to `False`, which refuses such data.
        allow_loss_change: Continue an interrupted epoch with another loss; its metrics then start
            with the next batch. Also return a finished run that was trained with another loss, or
            with other settings of the optimizer or of a layer. Defaults to `False`, which refuses
            both. Between epochs, a changed loss is only reported.
        restore_learning_rate: `False` uses the script's learning rate if the script has changed it
            since the checkpoint was made. Defaults to `True`: the checkpoint's.
        init_from: Folder or URL of another run. A new run starts with the weights of that run's
            newest checkpoint; layers that are new or have another shape are reported and keep
            their initial values. Once the run has a checkpoint, this has no effect. Defaults to
            `None`.
        init_optimizer: With `init_from`, restore the optimizer's state as well, except the
            learning rate. Defaults to `False`.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    allow_batch_change: bool = False
    allow_data_change: bool = False
    allow_loss_change: bool = False
    restore_learning_rate: bool = True
    init_from: str | os.PathLike[str] | None = None
    init_optimizer: bool = False

    @classmethod
    def names(cls) -> frozenset[str]:
        """Returns the names of its fields."""
        return frozenset(each.name for each in fields(cls))

    def __post_init__(self) -> None:
        if self.init_optimizer and self.init_from is None:
            raise ConfigurationError(
                "`init_optimizer` restores the optimizer of the run in `init_from`, which is not "
                "given. Received: init_optimizer=True. Pass `init_from`, or omit `init_optimizer`."
            )
        if self.init_from is not None:
            object.__setattr__(self, "init_from", os.fspath(self.init_from))


@dataclass(frozen=True, repr=False)
class LocalCheckpoints(ShortRepr):
    """Checkpoints on the workers' own machines, in addition to those in `backup_dir`.

    Every worker writes the whole state to its machine and keeps two copies of it, three while it
    writes. They are deleted when training has finished. Training resumes from the newest checkpoint
    in either place; a local one counts only if every worker finds a complete copy of it. A process
    that dies therefore costs the training since the last local checkpoint, a lost machine the
    training since the last checkpoint in `backup_dir`.

    Example:

    ```python
    kd.BackupAndRestore("s3://bucket/mnist", local=kd.LocalCheckpoints("/dev/shm/mnist", "30s"))
    ```

    Args:
        local_tier: A folder on every worker's own machine, in memory (`/dev/shm/mnist`) or on a
            disk.
        local_freq: How often to save there, as in `save_freq`. Defaults to `"auto"`.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    local_tier: str | os.PathLike[str]
    local_freq: SaveFreq = "auto"

    def __post_init__(self) -> None:
        if not open_files(self.local_tier).traits.is_near:
            raise ConfigurationError(
                "Expected `local_tier` to be a folder on every worker's own machine, such as "
                f"/dev/shm/mnist. Received: {os.fspath(self.local_tier)!r}"
            )
        get_cadence(self.local_freq, Saving.max_overhead, "local_freq")
        object.__setattr__(self, "local_tier", os.fspath(self.local_tier))

    def open(self, saving: Saving) -> tuple[Files, Cadence]:
        """Returns the folder of local checkpoints, and their cadence."""
        cadence = get_cadence(self.local_freq, saving.max_overhead, "local_freq")
        return open_files(self.local_tier), cadence


class ResumingFields(TypedDict, total=False):
    """The fields of `Resuming` as single arguments."""

    allow_batch_change: bool
    allow_data_change: bool
    allow_loss_change: bool
    restore_learning_rate: bool
    init_from: str | os.PathLike[str] | None
    init_optimizer: bool


class Single(ResumingFields, total=False):
    """The fields of these values as single arguments of `BackupAndRestore`."""

    on_busy: Literal["skip", "wait"]
    max_overhead: float
    max_failed_saves: int
    keep_last: int
    keep_every_steps: int | None
    keep_best: tuple[str, Mode, int] | None
    local_tier: str | os.PathLike[str] | None
    local_freq: SaveFreq | None


@dataclass(frozen=True)
class Settings:
    """All settings of `BackupAndRestore`."""

    saving: Saving
    retention: Retention
    resuming: Resuming
    local: LocalCheckpoints | None

    @classmethod
    def of(
        cls,
        saving: Saving,
        retention: Retention,
        resuming: Resuming,
        local: LocalCheckpoints | None,
        single: Mapping[str, Any],
    ) -> Settings:
        """Merges values and single arguments; every setting may be given in one of the two ways."""
        if unknown := sorted(single.keys() - get_type_hints(Single).keys()):
            raise TypeError(
                f"BackupAndRestore.__init__() got an unexpected keyword argument {unknown[0]!r}"
            )
        if single.get("local_freq") is not None and local is None is single.get("local_tier"):
            raise ConfigurationError(
                "`local_freq` sets how often a checkpoint is saved in the folder `local_tier`, "
                f"which is not given. Received: local_freq={single['local_freq']!r}. Pass "
                "`local_tier`, or omit `local_freq`."
            )
        of_local = {
            name: single[name]
            for name in ("local_tier", "local_freq")
            if single.get(name) is not None
        }
        return cls(
            merged("saving", Saving, saving, single),
            merged("retention", Retention, retention, single),
            merged("resuming", Resuming, resuming, single),
            merged("local", LocalCheckpoints, local, of_local) if local or of_local else None,
        )


SAVING, RETENTION, RESUMING = Saving(), Retention(), Resuming()  # the defaults
_V = TypeVar("_V", Saving, Retention, Resuming, LocalCheckpoints)


def merged(name: str, kind: type[_V], value: object, single: Mapping[str, Any]) -> _V:
    """Merges a value with its fields given as single arguments; other arguments are ignored.

    Raises:
        ConfigurationError: If both are given, or the value is of another kind.
    """
    own = {each.name: single[each.name] for each in fields(kind) if each.name in single}
    if value in (None, SAVING, RETENTION, RESUMING):
        return kind(**own)
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"Expected `{name}` to be a `keras_distplug.{kind.__name__}`. Received: {value!r}"
        )
    if own:
        raise ConfigurationError(
            f"Expected {', '.join(f'`{each}`' for each in own)} inside `{name}`, because `{name}` "
            f"is given. Received: {name}={value!r} and "
            f"{', '.join(f'{each}={setting!r}' for each, setting in own.items())}"
        )
    return value
