"""Checks that all workers are about to train the same model on the same data."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.input import epochs
from keras_distplug.backend.tensorflow.runtime import context, versions
from keras_distplug.callbacks.run_keeper import RunKeeper
from keras_distplug.checkpoint import changed_settings, compilation, same_run
from keras_distplug.cluster import agreement
from keras_distplug.cluster.channel import Channel
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.log import announce
from keras_distplug.data import contents
from keras_distplug.data.contents import CONTENTS, ORDER
from keras_distplug.data.position import Positioned, count_batches, is_own_part
from keras_distplug.data.sources import SEEDS

Facts = Mapping[str, str]
"""The training that a worker is about to start, as texts by name."""

_ARGUMENTS = (
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "batch_size",
    "shuffle",
    "class_weight",
    "validation_split",
    "validation_freq",
    "validation_steps",
    "validation_batch_size",
)
_SEED = "the seed of `keras.utils.set_random_seed`"
_DATA, _VALIDATION = "data: ", "validation_data"
# Of a worker that reads its own part of the data.
_STEPS = {"steps_per_epoch": "batches per epoch", "validation_steps": "batches of validation_data"}
_PARTS = {f"{CONTENTS} of {part}" for part in ("x", "y", "sample_weight")}
_HASHED = (f"{_DATA}{CONTENTS}", f"{_DATA}{ORDER}")
_OF_CHIEF = (_SEED, "optimizer.learning_rate")  # variables: all workers get the chief's value
_HARMLESS = ("Python", "NumPy")
_DTYPE = ".dtype"  # of a layer: often chosen to suit the machine
_NONE = "none"
_CLOCK_SECS = 5.0
_COUNTED = re.compile(r"_\d+$")  # Keras numbers names within a process
_MOST_SHOWN, _MOST_CHARS = 3, 200


def watch() -> None:
    """Compares the workers before every multi-worker `fit`, before it makes variables."""
    trainer.install_dispatch()
    trainer.call_before_building(require_same_fit)


def describe_compiled_model(model: keras.Model) -> Facts:
    """Describes a model and how it is compiled."""
    weights = model.weights if model.built else ()
    return {
        **{name: str(kind) for name, kind in same_run.describe_model(model).items()},
        **changed_settings.as_texts(compilation.get_settings(model)),
        **{
            f"weight {number} ({_COUNTED.sub('', weight.name)})": str(tuple(weight.shape))
            for number, weight in enumerate(weights, 1)
        },
    }


def describe_fit_arguments(arguments: Mapping[str, Any]) -> Facts:
    """Describes the arguments of `fit`, except the data."""
    has_validation = arguments.get(_VALIDATION) is not None
    return {
        **{name: _text(arguments[name]) for name in _ARGUMENTS if arguments.get(name) is not None},
        _VALIDATION: "given" if has_validation else _NONE,
    }


def describe_process() -> Facts:
    """Describes the process."""
    return {
        **versions.installed(),
        "floatx": keras.config.floatx(),
        _SEED: _text(context.global_seed()),
    }


def of_fit() -> Facts:
    """Describes the arguments of the current `fit`, including the data."""
    loop = epochs.get_loop()
    if loop is None:
        return {}
    given = epochs.arguments_of_fit((*_ARGUMENTS, _VALIDATION))
    facts = dict(describe_fit_arguments(given))
    validation = given.get(_VALIDATION)
    if is_own_part(validation):
        facts.update(_describe_steps("validation_steps", given, validation))
    elif isinstance(validation, tf.data.Dataset | tuple | list):
        known = changed_settings.fit_settings().get(_VALIDATION, _NONE)
        facts[f"{_DATA}{CONTENTS} of {_VALIDATION}"] = _text(known)
    is_positioned = isinstance(loop.dataset, Positioned)
    read = loop.dataset if is_positioned else loop.whole_dataset
    if read is None or is_own_part(read):  # None: the script has distributed it
        return {**facts, **_describe_steps("steps_per_epoch", given, loop.dataset)}
    if is_positioned:
        described = loop.dataset.source.fingerprint()
        data = {name: _text(each) for name, each in described.items() if name != SEEDS}
    else:
        adapter = loop.adapter
        data = {"batches": _text(adapter.num_batches), "batch_size": _text(adapter.batch_size)}
        data |= contents.fingerprint_fit()
    if len(data.keys() & _PARTS) > 1:
        del data[CONTENTS]  # of all parts together
    holds_state = is_positioned and loop.dataset.source.holds_state
    if holds_state or loop.py_dataset is not None or loop.torch_loader is not None:
        # An object may hold values drawn or read before. Every worker takes its own part.
        data = {name: each for name, each in data.items() if not name.startswith((CONTENTS, ORDER))}
    return {**facts, **{_DATA + name: each for name, each in data.items()}}


def _describe_steps(argument: str, given: Mapping[str, Any], data: Any) -> Facts:
    """Describes the steps that Keras runs with this worker's part of the data."""
    if given.get(argument) is not None:
        return {}
    # Where Keras does not know the number, the workers find the end of the data together.
    return {_STEPS[argument]: _text(count_batches(data))}


def require_same_fit(model: keras.Model) -> None:
    """Compares the current `fit` with that of the other workers, which must call this as well, if a
    callback keeps its run."""
    callbacks = epochs.arguments_of_fit(["callbacks"]).get("callbacks")
    listed = getattr(callbacks, "callbacks", callbacks)
    if not any(isinstance(each, RunKeeper) for each in keras.tree.flatten(listed)):
        return
    role = agreement.get_role(model.distribute_strategy)
    if role.world_size > 1:
        facts = {**describe_process(), **describe_compiled_model(model), **of_fit()}
        require_same(agreement.get_channel(role), facts)


def require_same(channel: Channel, facts: Facts, clock: Callable[[], float] = time.time) -> None:
    """Compares what all workers are about to train. All workers must call this together.

    Args:
        channel: The channel to the other workers.
        facts: What this worker is about to train.
        clock: Returns the time in seconds.

    Raises:
        ConfigurationError: On all workers, if a difference would make training wrong.
    """
    role = channel.role
    message = json.dumps({"facts": facts, "at": clock()}) if role.is_chief else None
    chiefs = json.loads(channel.broadcast("start", message))
    late_secs = chiefs["at"] - clock()
    differences = list(_differences(chiefs["facts"], facts))
    replies = channel.gather("start", json.dumps([differences, late_secs, clock()]))
    now = clock()
    chief = role.workers[0]
    refused: list[Difference] = []
    noted: list[str] = []
    for name, each in zip(role.workers, replies, strict=True):
        other, lag_secs, at = json.loads(each)
        for found in (Difference(chief, name, *one) for one in other):
            if found.is_harmless:
                noted.append(str(found))
            else:
                refused.append(found)
        # Messages take time, so only a time stamp from the future proves that a clock is wrong.
        if max(lag_secs, at - now) > _CLOCK_SECS:
            way, secs = ("behind", lag_secs) if lag_secs > at - now else ("ahead of", at - now)
            noted.append(f"the clock of {name} is {secs:.0f} s {way} {chief}'s")
    if refused:
        refused.sort(key=lambda each: each.has_hashes)  # sizes are more helpful than hashes
        raise ConfigurationError(
            f"The workers are about to train different things ({_joined(refused)}). Give every "
            "worker the same script, arguments, data and package versions."
            f"{refused[0].remedy} Nothing was trained."
        )
    if noted and role.is_chief:
        announce(f"the workers differ ({_joined(noted)})")


@dataclass(frozen=True)
class Difference:
    """A difference between the chief and another worker.

    Args:
        chief: The name of the chief.
        worker: The name of the other worker.
        what: The name of the fact that differs.
        there: Its value on the chief.
        here: Its value on the other worker.
    """

    chief: str
    worker: str
    what: str
    there: str
    here: str

    @property
    def is_harmless(self) -> bool:
        """True if it does not affect training."""
        return self._uses_chiefs_value or self.what in _HARMLESS or self.what.endswith(_DTYPE)

    @property
    def has_hashes(self) -> bool:
        """True if its values are hashes."""
        return self.what.startswith(_HASHED)

    @property
    def remedy(self) -> str:
        """A sentence about data; empty for other differences."""
        for argument, batches in _STEPS.items():
            if self.what == batches:
                return f" Or pass the smallest number as `{argument}`."
        if not self.what.startswith(_DATA):
            return ""
        return (
            " If every worker reads its own part of the data, give a tf.data.Dataset with "
            "AutoShardPolicy.OFF."
        )

    @property
    def _uses_chiefs_value(self) -> bool:
        values = (self.there, self.here)
        is_plain = all(each == _NONE or changed_settings.is_number(each) for each in values)
        return self.what in _OF_CHIEF and is_plain

    def __str__(self) -> str:
        what, there, here = self.what.removeprefix(_DATA), self.there, self.here
        if self.has_hashes:
            what = {CONTENTS: "the samples", ORDER: "the order of the samples"}.get(what, what)
            what = what.removeprefix(f"{CONTENTS} of ")
            there, here = (each if each == _NONE else f"hash {each}" for each in (there, here))
        message = f"{what}: {there} on {self.chief}, {here} on {self.worker}"
        return f"{message}, {self.chief}'s is used" if self._uses_chiefs_value else message


def _differences(chiefs: Facts, own: Facts) -> Iterator[tuple[str, str, str]]:
    for name in [*chiefs, *(name for name in own if name not in chiefs)]:
        there, here = chiefs.get(name, _NONE), own.get(name, _NONE)
        if there != here:
            yield name, there, here


def _joined(found: Sequence[object]) -> str:
    lines = list(dict.fromkeys(map(str, found)))
    left = len(lines) - _MOST_SHOWN
    return "; ".join([*lines[:_MOST_SHOWN], *([f"and {left} more"] if left > 0 else [])])


def _text(value: Any) -> str:
    return _NONE if value is None else str(value)[:_MOST_CHARS]
