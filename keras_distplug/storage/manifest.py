"""What a checkpoint's MANIFEST.json says. The checkpoint exists when its manifest exists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError
from keras_distplug.core.hints import require_types
from keras_distplug.core.state import Completion, Cursor
from keras_distplug.storage.sealed import ChangedError, seal, unseal

SCHEMA_VERSION = 4
_MOST = 2**63
_DTYPE = re.compile(r"[a-z]\w*(\[\w+\])?")

_FILE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._-]*")
# `adam_2/sequential_1_dense_3_kernel_momentum`: optimizers put the whole path into one name.
_COUNT = re.compile(r"[_#]\d+(?=[_/#]|$)")


@dataclass(frozen=True)
class VariableSpec:
    """A variable without its value.

    Args:
        key: `"model/conv2d/kernel"`.
        shape: Its shape.
        dtype: NumPy's name, or `"bfloat16"` and its like.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not _DTYPE.fullmatch(self.dtype):  # NumPy parses others, and may raise a SyntaxError
            raise ValueError(f"Expected the name of a type. Received: {self.dtype!r}")
        if not all(0 <= size < _MOST for size in self.shape):
            raise ValueError(f"Expected sizes of at least 0 and below 2**63. Received: {self}")

    def __str__(self) -> str:
        return f"{self.key} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint.

    Args:
        file: Its path, from the folder of the manifest.
        bytes: Its size.
        xxh3_128: XXH3 of its content, 128 bits in hexadecimal.
    """

    file: str
    bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.file):
            raise ValueError(f"Expected a path below the manifest. Received: {self.file!r}")
        if not 0 <= self.bytes < _MOST:
            raise ValueError(f"Expected a size of 0 to 2**63 - 1 bytes. Received: {self.bytes}")


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its arrays.

    Args:
        cursor: Where the run stood.
        variables: All variables, in the model's order.
        shards: The files that hold their values.
        history: Keras' `History.history`.
        history_epochs: Keras' `History.epoch`.
        metrics: Those of the logs at that point that were numbers.
        other_logs: The rest of the logs.
        data: Position of the input pipeline.
        stop_training: True if a callback had asked for the end of training.
        completion: Set if the run had reached its end.
        how_built: What makes the model's variables without data.
        callbacks: What other callbacks knew.
        random: The random generators of each worker's process.
        world_size: Workers that trained.
        nonce: Different for every attempt to save.
        created_utc: ISO 8601.
        versions: Packages that wrote it.
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
        """The text of MANIFEST.json, which carries a SHA-256 of itself."""
        return seal({"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str, source: str) -> Manifest:
        """The inverse of `to_json`.

        Args:
            text: What was read.
            source: Where it was read, for errors.

        Raises:
            CorruptCheckpointError: If `text` is not what `to_json` gave.
            CheckpointError: If it is what the `to_json` of another release gave.
        """
        try:
            body = unseal(text)
        except ChangedError as error:
            raise CorruptCheckpointError(f"{source} was changed after it was written.") from error
        except ValueError as error:
            raise CorruptCheckpointError(f"{source} is no complete manifest: {error}") from error
        # Another release's manifest is whole: it must not be taken for a damaged one.
        if (schema_version := body.pop("schema_version", None)) != SCHEMA_VERSION:
            raise CheckpointError(
                f"{source} has schema version {schema_version!r}, this release reads "
                f"{SCHEMA_VERSION}. Read it with the release of keras_distplug that wrote it."
            )
        try:
            return _from_body(body)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{source} is no manifest: {error!r}") from error


def first_difference(
    stored: Sequence[VariableSpec], current: Sequence[VariableSpec], *, by_path: bool = True
) -> str | None:
    """Where two models differ first, in words; None if a checkpoint of one fits the other.

    Variables are compared in their order. Names that Keras counts up within a process
    (`dense_1`, `dense_2`) count as the same, the model's own name does not count, and of an
    optimizer's variable its own name counts: the path before it depends on where the optimizer was
    built.

    Args:
        stored: The variables of a checkpoint.
        current: Those of the model.
        by_path: `False` for a model that was made from what Keras told of the one of the
            checkpoint: it has the same variables in the same order, but the paths depend on how
            each was built.
    """
    for position, (old, new) in enumerate(zip(stored, current, strict=False), start=1):
        is_group_other = old.key.partition("/")[0] != new.key.partition("/")[0]
        names = _uncounted(old.key, by_path), _uncounted(new.key, by_path)
        if (
            is_group_other
            or not _are_same(*names)
            or (old.shape, old.dtype) != (new.shape, new.dtype)
        ):
            return f"variable {position} is `{old}` there and `{new}` here"
    if len(stored) == len(current):
        return None
    place = min(len(stored), len(current))
    where, extra = ("there", stored) if len(stored) > place else ("here", current)
    return (
        f"{len(stored)} variables there and {len(current)} here; the first one too many is "
        f"`{extra[place]}` {where}"
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
    """Whether names are the same, but for the model's own: in one that Keras has loaded from a file
    `sequential/dense/kernel` is `dense/kernel`."""
    short, long = sorted((one, other), key=len)
    return short == long or (bool(short) and long.endswith((f"/{short}", f"_{short}")))


def uncounted(key: str) -> str:
    """A key without the numbers that Keras counts up within a process."""
    return _COUNT.sub("", key)


def _uncounted(key: str, by_path: bool) -> str:
    group, _, path = key.partition("/")
    if by_path and group == "model":
        return _COUNT.sub("", path)
    # What optimizers make of a path in one name cannot be told from the variable's own.
    return _COUNT.sub("", path.rpartition("/")[2]) if by_path or group == "model" else group
