"""The content of a checkpoint's MANIFEST.json. The checkpoint exists when its manifest exists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError
from keras_distplug.core.hints import require_types
from keras_distplug.core.state import Completion, Cursor
from keras_distplug.storage.sealed import ChangedError, seal, unseal

SCHEMA_VERSION = 4
_MOST = 2**63
_DTYPE = re.compile(r"[a-z]\w*(\[\w+\])?")

_FILE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._-]*")
# `adam_2/sequential_1_dense_3_kernel_momentum`: optimizers join the whole path to one name.
_COUNT = re.compile(r"[_#]\d+(?=[_/#]|$)")


@dataclass(frozen=True)
class VariableSpec:
    """A variable without its value.

    Args:
        key: Its path, such as `"model/conv2d/kernel"`.
        shape: Its shape.
        dtype: The name of its type: one of NumPy's, or `"bfloat16"` and similar.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not _DTYPE.fullmatch(self.dtype):  # NumPy parses others, and may raise a SyntaxError
            raise ValueError(f"Expected the name of a dtype. Received: {self.dtype!r}")
        if not all(0 <= size < _MOST for size in self.shape):
            raise ValueError(f"Expected sizes of at least 0 and below 2**63. Received: {self}")

    def __str__(self) -> str:
        return f"{self.key} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint.

    Args:
        file: Its path, relative to the manifest's folder.
        bytes: Its size in bytes.
        xxh3_128: XXH3 of its content, 128 bits in hexadecimal.
    """

    file: str
    bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.file):
            raise ValueError(f"Expected a path in the manifest's folder. Received: {self.file!r}")
        if not 0 <= self.bytes < _MOST:
            raise ValueError(f"Expected a size of 0 to 2**63 - 1 bytes. Received: {self.bytes}")


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its arrays.

    Args:
        cursor: The position of the run.
        variables: All variables, in the model's order.
        shards: The files that hold their values.
        history: Keras' `History.history`.
        history_epochs: Keras' `History.epoch`.
        metrics: The numbers in the logs at that point.
        other_logs: The rest of the logs.
        data: The position of the input pipeline.
        stop_training: True if a callback had requested the end of training.
        completion: Set if the run had finished.
        how_built: The information to create the model's variables without data.
        callbacks: The states of other callbacks.
        random: The states of the random generators in every worker's process.
        world_size: The number of workers.
        nonce: Different for every attempt to save.
        created_utc: The time in ISO 8601.
        versions: The versions of the packages that wrote it, by name.
    """

    cursor: Cursor
    variables: tuple[VariableSpec, ...]
    shards: tuple[Shard, ...]
    world_size: int
    nonce: str
    created_utc: str
    versions: Mapping[str, str] = field(default_factory=dict)
    history: Mapping[str, list[Any]] = field(default_factory=dict)
    history_epochs: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    other_logs: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    stop_training: bool = False
    completion: Completion | None = None
    how_built: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Mapping[str, Any], ...] = ()
    random: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> str:
        """Returns the text of MANIFEST.json, which includes a SHA-256 of itself."""
        return seal({"schema_version": SCHEMA_VERSION, **vars(self)})

    @classmethod
    def from_json(cls, text: str, source: str) -> Manifest:
        """Parses the text of MANIFEST.json, the inverse of `to_json`.

        Args:
            text: The text of the file.
            source: The name of the file, for errors.

        Raises:
            CorruptCheckpointError: If `text` is not what `to_json` returned.
            CheckpointError: If another release wrote it.
        """
        try:
            body = unseal(text)
        except ChangedError as error:
            raise CorruptCheckpointError(
                f"{source} was changed after it was written: its checksum does not match."
            ) from error
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{source} is not a complete manifest: {error}."
            ) from error
        # Another release's manifest is intact, and must not be reported as damaged.
        if (schema_version := body.pop("schema_version", None)) != SCHEMA_VERSION:
            raise CheckpointError(
                f"{source} has schema version {schema_version!r}, but this release of "
                f"keras_distplug reads version {SCHEMA_VERSION} only. Read it with the release "
                "that wrote it."
            )
        try:
            return _from_body(body)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{source} is not a valid manifest: {error!r}.") from error


def first_difference(
    stored: Sequence[VariableSpec], current: Sequence[VariableSpec], *, by_path: bool = True
) -> str | None:
    """Describes the first difference between two models; None if a checkpoint of one fits the
    other.

    Variables are compared in order. Numbers that Keras adds to names within a process (`dense_1`,
    `dense_2`) are ignored, and so is the name of the model itself. For an optimizer's variable,
    only the last name is compared: the path before it depends on where the optimizer was built.

    Args:
        stored: The variables of a checkpoint.
        current: The variables of the model.
        by_path: `False` for a model that was created from the stored architecture: it has the same
            variables in the same order, but their paths depend on how the model was built.
            Defaults to `True`.
    """
    for position, (old, new) in enumerate(zip(stored, current, strict=False), start=1):
        is_group_other = old.key.partition("/")[0] != new.key.partition("/")[0]
        names = _uncounted(old.key, by_path), _uncounted(new.key, by_path)
        if (
            is_group_other
            or not _are_same(*names)
            or (old.shape, old.dtype) != (new.shape, new.dtype)
        ):
            return f"variable {position} is `{old}` in the checkpoint and `{new}` in the model"
    if len(stored) == len(current):
        return None
    place = min(len(stored), len(current))
    where, extra = ("checkpoint", stored) if len(stored) > place else ("model", current)
    return (
        f"{len(stored)} variables in the checkpoint and {len(current)} in the model; the first "
        f"extra one is `{extra[place]}` in the {where}"
    )


def _from_body(body: dict[str, Any]) -> Manifest:
    completion = body.pop("completion")
    manifest = Manifest(
        cursor=Cursor(**body.pop("cursor")),
        variables=tuple(
            VariableSpec(spec["key"], tuple(spec["shape"]), spec["dtype"])
            for spec in body.pop("variables")
        ),
        shards=tuple(Shard(**shard) for shard in body.pop("shards")),
        history_epochs=tuple(body.pop("history_epochs")),
        callbacks=tuple(body.pop("callbacks")),
        random=tuple(body.pop("random")),
        completion=None if completion is None else Completion(**completion),
        **body,
    )
    for each in (manifest, *manifest.variables, *manifest.shards):
        require_types(each)
    if manifest.completion is not None:
        require_types(manifest.completion)
    return manifest


def _are_same(one: str, other: str) -> bool:
    """True if names are the same apart from the model's own: in a model that Keras loaded from a
    file, `sequential/dense/kernel` is named `dense/kernel`."""
    short, long = sorted((one, other), key=len)
    return short == long or (bool(short) and long.endswith((f"/{short}", f"_{short}")))


def uncounted(key: str) -> str:
    """Returns a key without the numbers that Keras adds to names within a process."""
    return _COUNT.sub("", key)


def _uncounted(key: str, by_path: bool) -> str:
    group, _, path = key.partition("/")
    if by_path and group == "model":
        return _COUNT.sub("", path)
    # Optimizers join a path to one name, which cannot be split from the variable's own.
    return _COUNT.sub("", path.rpartition("/")[2]) if by_path or group == "model" else group
