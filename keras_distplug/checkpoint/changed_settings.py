"""What a script sets otherwise than when a checkpoint was made, and which of the two counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_distplug.backend.tensorflow.input import epochs
from keras_distplug.core.errors import OtherRunError
from keras_distplug.core.state import Cursor
from keras_distplug.data import contents

_RATE = "optimizer.learning_rate"
_VALIDATION = "validation_data"
_LAYER, _OPTIMIZER = "layer ", "optimizer."  # prefixes
_DTYPE = ".dtype"  # often chosen by the machine
_LOGGED_RATES = ("learning_rate", "lr")
_MEANING = ("loss", "loss_weights")  # they change what is trained
_INNER = "inner_optimizer"  # of one that scales the loss
_OBJECT, _FUNCTION, _LAMBDA = "class_name", "function", "__lambda__"  # in what Keras serializes
_USUAL = (None, False, 0.0, -1, "sum_over_batch_size")  # what a loss has that stands for a function
_BY_THE_MACHINE = ("jit_compile",)  # by default


@dataclass(frozen=True)
class Change:
    """A setting of the script that has another value than at the checkpoint.

    Args:
        name: Such as `optimizer.beta_1`.
        before: Its value then, as text.
        now: Its value in the script.
    """

    name: str
    before: str
    now: str

    @property
    def is_of_meaning(self) -> bool:
        """Whether the mean of an epoch under way would mix two things."""
        return self.name in _MEANING

    @property
    def is_of_logs(self) -> bool:
        """Whether what an epoch has counted so far is of something else."""
        return self.is_of_meaning or self.name in ("metrics", "weighted_metrics")

    @property
    def is_rate(self) -> bool:
        """Whether it is a number in a variable, which the checkpoint holds."""
        return self.name == _RATE and is_number(self.before) and is_number(self.now)

    @property
    def is_of_data(self) -> bool:
        """Whether its values are hashes."""
        return self.name == _VALIDATION

    @property
    def is_of_layer(self) -> bool:
        """Whether a layer has it."""
        return self.name.startswith(_LAYER)

    @property
    def is_of_training(self) -> bool:
        """Whether a whole run would have other weights."""
        if self.is_of_layer:
            return not self.name.endswith(_DTYPE)
        return self.is_of_meaning or self.name.startswith(_OPTIMIZER)

    def __str__(self) -> str:
        if self.is_of_data:
            return "the validation data has changed since the checkpoint"
        return f"`{self.name}` {self.now} from the script, not {self.before} from the checkpoint"


def of_fit() -> Mapping[str, Any]:
    """Describes the arguments of the `fit` that calls; JSON-able."""
    described: dict[str, Any] = {}
    if (loop := epochs.of_fit()) is not None:
        described["steps_per_epoch"] = loop.steps_per_epoch
        given = epochs.arguments_of_fit([_VALIDATION]).get(_VALIDATION)
        parts = given if isinstance(given, list | tuple) else (given,)
        if given is None:
            described[_VALIDATION] = "none"
        elif (known := contents.of_given(*parts[:3]).get(contents.CONTENTS)) is not None:
            described[_VALIDATION] = known
    return described


def require_allowed(
    changes: Sequence[Change], cursor: Cursor, where: str, *, other_loss: bool
) -> None:
    """Checks that an interrupted epoch continues with the loss it started with.

    Args:
        changes: From `compare`.
        cursor: The position from which the run resumes.
        where: The run, for errors.
        other_loss: Whether it may continue with a different one.

    Raises:
        OtherRunError: If it does not.
    """
    for change in changes:
        if change.is_of_meaning and cursor.batch and not other_loss:
            raise OtherRunError(
                f"{where} was interrupted after batch {cursor.batch} of epoch {cursor.epoch + 1}, "
                f"which started with `{change.name}` {change.before}. Received: {change.now}. "
                f"Compile with the same `{change.name}`, or give allow_loss_change=True to "
                "continue with the new one, or resume=False to start a new run. Nothing was "
                "changed."
            )


def require_same_training(
    changes: Sequence[Change], history: Mapping[str, Any], where: str, *, is_same_size: bool
) -> None:
    """Checks that a finished run was trained as the script would train it.

    Args:
        changes: As in `of_training`, here and below.
        history: The run's `History`.
        where: The run, for errors.
        is_same_size: Whether the workers and the global batch are the same.

    Raises:
        OtherRunError: If it was not.
    """
    for change in of_training(changes, history, is_same_size=is_same_size):
        raise OtherRunError(
            f"{where} is finished, and was trained with `{change.name}` {change.before}. Received: "
            f"{change.now}. Give this training a directory of its own, or resume=False to start a "
            "new run, or allow_loss_change=True to get the finished run's History and weights. "
            "Nothing was changed."
        )


def of_training(
    changes: Sequence[Change], history: Mapping[str, Any], *, is_same_size: bool
) -> list[Change]:
    """Returns those with which a finished run would have ended with other weights.

    Args:
        changes: From `compare`.
        history: The run's `History`. A learning rate from it may be that of a model which was saved
            during the run, or whose `fit` was called again after a failure.
        is_same_size: Whether the workers and the global batch are the same. To others, a script may
            scale the settings of its optimizer.
    """
    logged = [rate for name in _LOGGED_RATES for rate in history.get(name, ())]
    rates = {_text(each) for each in logged if isinstance(each, float)}
    return [
        each
        for each in changes
        if each.is_of_training
        and not (each.name == _RATE and each.now in rates)
        and not (each.name.startswith(_OPTIMIZER) and not is_same_size)
    ]


def lines(changes: Sequence[Change], rate: float | None, *, ends: bool) -> list[str]:
    """Says of each change what counts.

    Args:
        changes: From `compare`.
        rate: The learning rate of the checkpoint, if it is used.
        ends: Whether the run ends there.
    """
    if ends:
        return [
            "the finished run used different validation data"
            if each.is_of_data
            else f"the finished run used `{each.name}` {each.before}, not {each.now}"
            for each in changes
        ]
    return [
        f"learning rate {rate:.6g} from the checkpoint, not {each.now} from the script; "
        "`restore_learning_rate=False` uses the script's"
        if each.is_rate and rate is not None
        else str(each)
        for each in changes
    ]


def compare(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Change]:
    """Compares how two processes have started a `fit`.

    Args:
        there: What was compiled (`compiled`, None if Keras cannot tell), the arguments of `fit`
            (`fit`) and the settings of layers (`layers`) in the process that made the checkpoint.
        here: The same of this one.
    """
    found = []
    for kind in ("compiled", "fit", "layers"):
        before, now = there.get(kind), here.get(kind)
        if not isinstance(before, Mapping) or not isinstance(now, Mapping):
            continue
        if kind == "layers" and before.keys() != now.keys():
            continue  # some layers have others once they are built
        before, now = dict(_settings(before)), dict(_settings(now))
        found += [
            Change(name, before[name], now[name])
            for name in before
            if name in now and before[name] != now[name]
        ]
    return found


def as_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns, by name, what was compiled and the settings of layers, from the same values as in
    `compare`."""
    kinds = (settings.get(kind) for kind in ("compiled", "layers"))
    return dict(each for kind in kinds if isinstance(kind, Mapping) for each in _settings(kind))


def _settings(described: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in described.items():
        if name == "optimizer" and _is_object(value):
            yield from _settings_of_optimizer(value.get("config"))
        elif name in ("loss", "metrics", "weighted_metrics"):
            yield name, _text(_canonical(value))
        elif name.startswith(_LAYER) and isinstance(value, Mapping):
            yield from ((f"{name}.{setting}", _text(each)) for setting, each in value.items())
        elif name not in _BY_THE_MACHINE:
            yield name, _text(value)


def _settings_of_optimizer(config: Any) -> Iterator[tuple[str, str]]:
    for setting, value in config.items() if isinstance(config, Mapping) else ():
        if setting == _INNER and _is_object(value):
            yield from _settings_of_optimizer(value.get("config"))
        elif setting != "name":
            yield f"optimizer.{setting}", _text(value)


def _canonical(value: Any) -> Any:
    """Losses and metrics may be given by name, as a function, or as an object."""
    if isinstance(value, str):
        try:
            return getattr(keras.losses.get(value), "__name__", value)
        except ValueError:
            return value
    if isinstance(value, list):
        return [_canonical(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if not _is_object(value):
        return {name: _canonical(each) for name, each in value.items()}
    if value[_OBJECT] == _LAMBDA:
        return "a lambda"
    if value[_OBJECT] == _FUNCTION:
        return value.get("config")
    given = value.get("config")
    settings = dict(given) if isinstance(given, Mapping) else {}
    told = {
        name: each
        for name, each in settings.items()
        if name not in ("name", "dtype") and each not in _USUAL
    }
    return {_OBJECT: _snake(value[_OBJECT]), "config": told} if told else _snake(value[_OBJECT])


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if not isinstance(value, Mapping):
        return str(value)
    if not _is_object(value):
        return f"{{{', '.join(f'{name}: {_text(each)}' for name, each in value.items())}}}"
    given = value.get("config")
    if not isinstance(given, Mapping):
        return str(given)
    settings = {name: each for name, each in given.items() if name not in ("name", "dtype")}
    return f"{value[_OBJECT]}({', '.join(f'{n}={_text(e)}' for n, e in settings.items())})"


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and _OBJECT in value


def is_number(text: str) -> bool:
    """Whether a value is a number, and not a schedule, for example."""
    try:
        float(text)
    except ValueError:
        return False
    return True
