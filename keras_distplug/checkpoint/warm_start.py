"""Initializes a new run from a run in another folder."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_distplug.checkpoint import capture
from keras_distplug.cluster.channel import Channel
from keras_distplug.core.errors import ModelError, OtherRunError
from keras_distplug.storage import manifest, survey
from keras_distplug.storage.files import open_files
from keras_distplug.storage.manifest import VariableSpec
from keras_distplug.storage.store import CheckpointStore

_MOST_NAMED = 5
_MODEL = "model/"
_SCRIPTS = ("learning_rate", "seed_generator_state")  # keep the script's values


def load(
    model: keras.Model,
    directory: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    agreement: Channel,
    *,
    with_optimizer: bool,
) -> list[str]:
    """Loads values of another run's newest checkpoint into the variables of a model that have the
    same names and shapes.

    Args:
        model: A model about to be trained.
        directory: The other run's directory. Nothing is written there.
        storage_options: As in `BackupAndRestore`, for that directory.
        agreement: The channel over which the chief announces the checkpoint that it chose.
        with_optimizer: True to restore the optimizer as well, except its learning rate.

    Returns:
        Messages for the user.

    Raises:
        NoCheckpointError: If the directory has no checkpoint.
        ModelError: If the model is not built.
        OtherRunError: If no variable matches.
        CorruptCheckpointError: If the checkpoint is damaged.
    """
    if not model.built:
        raise ModelError(
            f"`init_from` needs a model that is built. Received: {model.name!r}, which has no "
            "weights yet. Give it a `keras.Input` as its first layer, or call it on a batch before "
            "`fit`."
        )
    files = open_files(directory, storage_options)
    chosen = None
    if agreement.role.is_chief:
        run = survey.find_run(files, None)
        chosen = json.dumps([run.name, survey.choose(files, run, None).name])
    run_name, name = json.loads(agreement.broadcast("init_from", chosen))
    stored = CheckpointStore(files, run_name).read(name)
    where = f"{files.where(run_name)}, checkpoint {name}"
    if with_optimizer:
        capture.build_optimizer(model)
    variables = {
        key: variable
        for key, variable in capture.list_variables(model).items()
        if not key.endswith(_SCRIPTS) and (with_optimizer or key.startswith(_MODEL))
    }
    specs = {spec.key: spec for spec in capture.make_specs(model) if spec.key in variables}
    matches = dict(_matched(list(stored.manifest.variables), list(specs.values())))
    if not matches:
        raise OtherRunError(
            f"Expected init_from to be a run of a similar model. Received: {where}, which has no "
            "variable with the name and shape of a variable of this model. Pass another run, or "
            "remove init_from. Nothing was changed."
        )
    capture.assign(model, variables, matches, stored.values(capture.allocate))
    taken = set(matches.values())
    lines = [f"{len(taken)} of {len(specs)} variables are initialized from {where}"]
    if new := [spec for key, spec in specs.items() if key not in taken]:
        named = ", ".join(f"`{_shown(spec)}`" for spec in new[:_MOST_NAMED])
        more = f" and {len(new) - _MOST_NAMED} more" if len(new) > _MOST_NAMED else ""
        lines.append(f"not found there with this shape, and keeping their values: {named}{more}")
    return lines


def _shown(spec: VariableSpec) -> str:
    return f"{spec.key.partition('/')[2]} {list(spec.shape)}"


def _matched(
    stored: Sequence[VariableSpec], here: Sequence[VariableSpec]
) -> Iterator[tuple[str, str]]:
    """Yields pairs of matching keys. Names that Keras numbers (`dense_1`) count as equal, in their
    order, and so do the names of the models."""
    there_by_name, here_by_name = _by_name(stored), _by_name(here)
    for name, mine in here_by_name.items():
        its = there_by_name.get(name, [])
        if len(its) != len(mine):  # some are new or removed: the numbers identify the same ones
            same = [key for key in mine if key in its]
            yield from zip(same, same, strict=True)
            its, mine = ([key for key in keys if key not in same] for keys in (its, mine))
        yield from zip(its, mine, strict=False)


def _by_name(specs: Sequence[VariableSpec]) -> dict[tuple[Any, ...], list[str]]:
    firsts = {_get_first(spec.key) for spec in specs if spec.key.startswith(_MODEL)}
    prefix = f"{_MODEL}{firsts.pop()}/" if len(firsts) == 1 else ""
    found: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for spec in specs:
        key = manifest.uncounted(spec.key)
        if prefix and key.count("/") > 2:
            key = key.removeprefix(prefix)
        found[key.removeprefix(_MODEL), spec.shape, spec.dtype].append(spec.key)
    return found


def _get_first(key: str) -> str:
    return manifest.uncounted(key).split("/")[1]
