"""MANIFEST.json."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError
from keras_distplug.core.state import Completion, Cursor
from keras_distplug.storage.manifest import (
    SCHEMA_VERSION,
    Manifest,
    Shard,
    VariableSpec,
    first_difference,
)
from keras_distplug.storage.sealed import compute_digest

KERNEL = VariableSpec("model/dense/kernel", (8, 10), "float32")
BIAS = VariableSpec("model/dense/bias", (10,), "bfloat16")
COUNT = VariableSpec("optimizer/iterations", (), "int64")


def manifest(**changes: Any) -> Manifest:
    values = {
        "cursor": Cursor(epoch=2, batch=3, step=19),
        "variables": (KERNEL, BIAS, COUNT),
        "shards": (Shard("3f0c/rank-0-1.safetensors", 348, "0f" * 16),),
        "world_size": 2,
        "nonce": "3f0c",
        "created_utc": "2025-01-02T03:04:05+00:00",
        "versions": {"keras": "3.12.0"},
        "history": {"loss": [0.5, 0.25], "accuracy": [0.1, 1e-300]},
        "history_epochs": (0, 1),
        "data": {"epoch": 2, "seed": 2**63},
        "stop_training": True,
        "completion": Completion(epochs=2, stopped_early=True),
        "callbacks": ({"callback": "EarlyStopping", "state": {"keras": {"wait": 2}}},),
    }
    return Manifest(**(values | changes))


def sealed(text: str, **changes: Any) -> str:
    """Returns `text` with other entries and a matching digest."""
    body = {key: value for key, value in json.loads(text).items() if key != "sha256"} | changes
    return json.dumps({**body, "sha256": compute_digest(body)})


def meaning(text: str) -> str | None:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"completion": None, "stop_training": False, "history": {}, "history_epochs": ()},
        {"history": {"Verlust µ \ud800": [1.0]}, "data": {"nested": [{"a": None}, 1.5, "x\n"]}},
        {"history": {"b": [1.0], "a": [2.0]}, "variables": (), "shards": ()},
    ],
    ids=["finished", "under way", "odd texts", "empty"],
)
def test_round_trip(changes: dict[str, Any]) -> None:
    """A manifest that is written and read is the same manifest."""
    before = manifest(**changes)
    after = Manifest.from_json(before.to_json(), "here")
    assert after == before
    assert list(after.history) == list(before.history)


def test_non_finite_history() -> None:
    """NaN and infinities in a History are preserved."""
    before = manifest(history={"loss": [float("nan"), float("inf"), float("-inf")]})
    after = Manifest.from_json(before.to_json(), "here")
    assert str(after.history) == "{'loss': [nan, inf, -inf]}"


def test_keys_that_json_changes() -> None:
    """A manifest with keys that JSON converts to strings can be read."""
    after = Manifest.from_json(manifest(data={2: "b", 10: "a"}).to_json(), "here")
    assert after.data == {"2": "b", "10": "a"}


def test_changed_character() -> None:
    """A manifest with a changed character is rejected, or has the same meaning."""
    text = manifest().to_json()
    refused = 0
    for position, old in enumerate(text):
        new = str((int(old) + 1) % 10) if old.isdigit() else chr(ord(old) ^ 1)
        changed = text[:position] + new + text[position + 1 :]
        if meaning(changed) == meaning(text):
            assert not old.isalnum()
            continue
        with pytest.raises(CorruptCheckpointError, match=r"^over/there "):
            Manifest.from_json(changed, "over/there")
        refused += 1
    assert refused >= sum(character.isalnum() for character in text)


def test_truncation() -> None:
    """A manifest that is truncated at any point is rejected."""
    text = manifest().to_json().rstrip()
    for length in range(len(text)):
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_json(text[:length], "here")


@pytest.mark.parametrize("text", ["[]", "1", '"sha256"', "null", "{}", '{"sha256": 1}', "\ufeff{}"])
def test_other_json(text: str) -> None:
    """JSON that is not a manifest is rejected."""
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_json(text, "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"cursor": {"epoch": -1, "batch": 0, "step": 0}},
        {"cursor": None},
        {"variables": [1]},
        {"shards": [{"file": "../x", "bytes": 1, "xxh3_128": ""}]},
        {"completion": {"epochs": 1}},
        {"unknown": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sealed_nonsense(changes: dict[str, Any]) -> None:
    """A matching digest does not make other JSON a manifest."""
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_json(sealed(manifest().to_json(), **changes), "here")


def test_other_schema_version() -> None:
    """A manifest of another release is not called damaged, and the message says what can read
    it."""
    text = sealed(manifest().to_json(), schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(CheckpointError, match="Read it with the release") as raised:
        Manifest.from_json(text, "here")
    assert not isinstance(raised.value, CorruptCheckpointError)


@pytest.mark.parametrize(
    "file",
    ["../x", "/x", "a//b", "", ".", "..", "a/../b", "a/", "a/./b", ".x", "a\\b", "a\n", "a b", "~"],
)
def test_shard_escapes(file: str) -> None:
    """A shard is below its manifest, with a plain name."""
    with pytest.raises(ValueError, match="in the manifest's folder"):
        Shard(file, 0, "")


@pytest.mark.parametrize("file", ["x", "a/b/c.safetensors", "3f0c/rank-0-1.safetensors", "A_1..2"])
def test_shard_names(file: str) -> None:
    """A shard's path consists of letters, digits, dots, dashes and underscores."""
    assert Shard(file, 0, "").file == file


def test_same_models() -> None:
    """Equal variables do not differ."""
    assert first_difference((KERNEL, BIAS), [KERNEL, BIAS]) is None
    assert first_difference((), ()) is None


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("model/dense_1/kernel", "model/dense_7/kernel"),
        ("model/dense/kernel", "model/dense_12/kernel"),
        (
            "model/seed_generator_3/seed_generator_state",
            "model/seed_generator/seed_generator_state",
        ),
        ("model/block/dense_1", "model/block/dense_2"),
    ],
)
def test_counted_names(there: str, here: str) -> None:
    """Names that differ only in Keras' numbers count as equal."""
    assert (
        first_difference([VariableSpec(there, (), "int8")], [VariableSpec(here, (), "int8")])
        is None
    )


@pytest.mark.parametrize(
    "other",
    [
        VariableSpec("model/dense/bias", (11,), "bfloat16"),
        VariableSpec("model/dense/bias", (10, 1), "bfloat16"),
        VariableSpec("model/dense/bias", (10,), "float16"),
        VariableSpec("model/dense/beta", (10,), "bfloat16"),
        VariableSpec("model/dense2/bias", (10,), "bfloat16"),
        VariableSpec("optimizer/dense/bias", (10,), "bfloat16"),
    ],
    ids=str,
)
def test_other_variable(other: VariableSpec) -> None:
    """A different shape, type or name is reported with its position and both specs."""
    difference = first_difference([KERNEL, BIAS, COUNT], [KERNEL, other, COUNT])
    assert difference == f"variable 2 is `{BIAS}` in the checkpoint and `{other}` in the model"


def test_other_number_of_variables() -> None:
    """The first extra variable is named, with the side that has it."""
    missing = first_difference([KERNEL, BIAS, COUNT], [KERNEL, BIAS])
    extra = first_difference([], [KERNEL])
    assert missing == (
        "3 variables in the checkpoint and 2 in the model; the first extra one is "
        f"`{COUNT}` in the checkpoint"
    )
    assert extra == (
        "0 variables in the checkpoint and 1 in the model; the first extra one is "
        f"`{KERNEL}` in the model"
    )


def test_digest() -> None:
    """The digest depends on every value, but not on the order of keys."""
    assert compute_digest({"a": 1, "b": [1, 2]}) == compute_digest({"b": [1, 2], "a": 1})
    different = [{"a": 1}, {"a": 2}, {"a": "1"}, {"a": 1.0}, {"a": [1]}, {"b": 1}, {}]
    assert len({compute_digest(body) for body in different}) == len(different)
