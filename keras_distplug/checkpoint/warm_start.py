"""What a new run takes over from a run in another folder."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from keras_distplug.checkpoint import capture
from keras_distplug.core.errors import OtherRunError
from keras_distplug.storage import manifest, survey
from keras_distplug.storage.files import open_files
from keras_distplug.storage.manifest import VariableSpec
from keras_distplug.storage.store import CheckpointStore

_MOST_NAMED = 5
_RATE = "learning_rate"  # the script's


def load(
    model: keras.Model,
    directory: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    *,
    with_optimizer: bool,
) -> list[str]:
    """Gives a model the values of another run's newest checkpoint, where name and shape are those
    of one of its variables.

    Args:
        model: A model about to be trained.
        directory: Of the other run. Nothing is written there.
        storage_options: As in `BackupAndRestore`.
        with_optimizer: Whether its optimizer goes on, too, but for the learning rate.

    Returns:
        Lines for people.

    Raises:
        NoCheckpointError: If there is no checkpoint.
        OtherRunError: If no variable matches.
        CorruptCheckpointError: If the checkpoint is damaged.
    """
    files = open_files(directory, storage_options)
    run = survey.the_run(files, None)
    name = survey.choose(files, run, None).name
    stored = CheckpointStore(files, run.name).read(name)
    where = f"{files.where(run.name)}, checkpoint {name}"
    capture.build(model, stored.manifest.how_built)
    if with_optimizer:
        capture.build_optimizer(model)
    variables = {
        key: variable
        for key, variable in capture.variables_of(model).items()
        if key.startswith("model/") or (with_optimizer and not key.endswith(_RATE))
    }
    specs = {spec.key: spec for spec in capture.specs_of(model) if spec.key in variables}
    matches = dict(_matched(stored.manifest.variables, specs.values()))
    if not matches:
        raise OtherRunError(
            f"Expected init_from to be a run of a similar model. Received: {where}, where no "
            "variable has the name and shape of one of this model. Nothing was changed."
        )
    capture.assign(variables, matches, stored.values(capture.allocate))
    taken = set(matches.values())
    lines = [f"{len(taken)} of {len(specs)} variables are initialized from {where}"]
    if new := [spec for key, spec in specs.items() if key not in taken]:
        named = ", ".join(f"`{_shown(spec)}`" for spec in new[:_MOST_NAMED])
        more = f" and {len(new) - _MOST_NAMED} more" if len(new) > _MOST_NAMED else ""
        lines.append(f"not found there with this shape, and left as they are: {named}{more}")
    return lines


def _shown(spec: VariableSpec) -> str:
    return f"{spec.key.partition('/')[2]} {list(spec.shape)}"


def _matched(
    stored: Iterable[VariableSpec], here: Iterable[VariableSpec]
) -> Iterator[tuple[str, str]]:
    """Pairs of keys. Names that Keras counts up (`dense_1`) count as the same, in their order."""
    by_name: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for spec in stored:
        by_name[_name_of(spec)].append(spec.key)
    waiting = []
    for spec in here:
        there = by_name[_name_of(spec)]
        if spec.key in there:
            there.remove(spec.key)
            yield spec.key, spec.key
        else:
            waiting.append(spec)
    for spec in waiting:
        if there := by_name[_name_of(spec)]:
            yield there.pop(0), spec.key


def _name_of(spec: VariableSpec) -> tuple[Any, ...]:
    return manifest.uncounted(spec.key), spec.shape, spec.dtype
