"""Compares a script's settings with those of a checkpoint, and decides which of the two apply."""

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
_DTYPE = ".dtype"  # often chosen to suit the machine
_LOGGED_RATES = ("learning_rate", "lr")
_MEANING = ("loss", "loss_weights")  # they change the training objective
_INNER = "inner_optimizer"  # the optimizer wrapped by one that scales the loss
_OBJECT, _FUNCTION, _LAMBDA = "class_name", "function", "__lambda__"  # in Keras' serialization
_USUAL = (None, False, 0.0, -1, "sum_over_batch_size")  # defaults of a loss that wraps a function
_BY_THE_MACHINE = ("jit_compile",)  # default depends on the machine


@dataclass(frozen=True)
class Change:
    """A setting of the script whose value differs from that at the checkpoint.

    Args:
        name: The setting's name, such as `optimizer.beta_1`.
        before: Its value at the checkpoint, as text.
        now: Its value in the script, as text.
    """

    name: str
    before: str
    now: str

    @property
    def changes_objective(self) -> bool:
        """True if the mean loss of an interrupted epoch would mix two objectives."""
        return self.name in _MEANING

    @property
    def changes_logs(self) -> bool:
        """True if the logs accumulated so far in an epoch measure something else."""
        return self.changes_objective or self.name in ("metrics", "weighted_metrics")

    @property
    def is_rate(self) -> bool:
        """True if it is a learning rate in a variable, which the checkpoint holds."""
        return self.name == _RATE and is_number(self.before) and is_number(self.now)

    @property
    def has_hashes(self) -> bool:
        """True if its values are hashes of data."""
        return self.name == _VALIDATION

    @property
    def concerns_layer(self) -> bool:
        """True if it is a layer's setting."""
        return self.name.startswith(_LAYER)

    @property
    def changes_training(self) -> bool:
        """True if a whole run with it would end with other weights."""
        if self.concerns_layer:
            return not self.name.endswith(_DTYPE)
        return self.changes_objective or self.name.startswith(_OPTIMIZER)

    def __str__(self) -> str:
        if self.has_hashes:
            return "the validation data has changed since the checkpoint"
        return f"`{self.name}` {self.now} from the script, not {self.before} from the checkpoint"


def fit_settings() -> Mapping[str, Any]:
    """Describes the arguments of the current call of `fit`; JSON-able."""
    described: dict[str, Any] = {}
    if (loop := epochs.get_loop()) is not None:
        described["steps_per_epoch"] = loop.steps_per_epoch
        given = epochs.arguments_of_fit([_VALIDATION]).get(_VALIDATION)
        parts = given if isinstance(given, list | tuple) else (given,)
        if given is None:
            described[_VALIDATION] = "none"
        elif (known := contents.fingerprint_given(*parts[:3]).get(contents.CONTENTS)) is not None:
            described[_VALIDATION] = known
    return described


def require_allowed(
    changes: Sequence[Change], cursor: Cursor, where: str, *, other_loss: bool
) -> None:
    """Checks that an interrupted epoch continues with the loss it started with.

    Args:
        changes: The result of `compare`.
        cursor: The position from which the run resumes.
        where: The run's location, for errors.
        other_loss: True if it may continue with a different loss.

    Raises:
        OtherRunError: If the loss differs.
    """
    for change in changes:
        if change.changes_objective and cursor.batch and not other_loss:
            raise OtherRunError(
                f"{where} was interrupted after batch {cursor.batch} of epoch {cursor.epoch + 1}, "
                f"which started with `{change.name}` {change.before}. Received: {change.now}. "
                f"Compile with the same `{change.name}`, pass allow_loss_change=True to continue "
                "with the new one, or pass resume=False to start a new run. Nothing was "
                "changed."
            )


def require_same_training(
    changes: Sequence[Change], history: Mapping[str, Any], where: str, *, is_same_size: bool
) -> None:
    """Checks that a finished run was trained as the script would train it.

    Args:
        changes: As in `training_changes`.
        history: As in `training_changes`.
        where: The run's location, for errors.
        is_same_size: As in `training_changes`.

    Raises:
        OtherRunError: If it was trained differently.
    """
    for change in training_changes(changes, history, is_same_size=is_same_size):
        raise OtherRunError(
            f"{where} is finished, and was trained with `{change.name}` {change.before}. Received: "
            f"{change.now}. Give this training a separate directory, pass resume=False to start "
            "a new run, or pass allow_loss_change=True to get the finished run's History and "
            "weights. Nothing was changed."
        )


def training_changes(
    changes: Sequence[Change], history: Mapping[str, Any], *, is_same_size: bool
) -> list[Change]:
    """Returns the changes with which a finished run would have ended with other weights.

    Args:
        changes: The result of `compare`.
        history: The run's `History`. The script's learning rate may be one of those logged in it:
            the model was saved during the run, or its `fit` was called again after a failure.
        is_same_size: True if the number of workers and the global batch size are unchanged. If
            not, a script may scale its optimizer's settings.
    """
    logged = [rate for name in _LOGGED_RATES for rate in history.get(name, ())]
    rates = {_text(each) for each in logged if isinstance(each, float)}
    return [
        each
        for each in changes
        if each.changes_training
        and not (each.name == _RATE and each.now in rates)
        and not (each.name.startswith(_OPTIMIZER) and not is_same_size)
    ]


def messages(changes: Sequence[Change], rate: float | None, *, ends: bool) -> list[str]:
    """Returns a message for every change that says which value applies.

    Args:
        changes: The result of `compare`.
        rate: The checkpoint's learning rate, if it is used.
        ends: True if the run ends there.
    """
    if ends:
        return [
            "the finished run used different validation data"
            if each.has_hashes
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
    """Compares the settings with which two processes started `fit`.

    Args:
        there: The compile arguments (`compiled`, None if Keras cannot serialize them), the
            arguments of `fit` (`fit`) and the settings of layers (`layers`) in the process that
            made the checkpoint.
        here: The same of this process.
    """
    found = []
    for kind in ("compiled", "fit", "layers"):
        before, now = there.get(kind), here.get(kind)
        if not isinstance(before, Mapping) or not isinstance(now, Mapping):
            continue
        if kind == "layers" and before.keys() != now.keys():
            continue  # some layers get other settings when they are built
        before, now = dict(_settings(before)), dict(_settings(now))
        found += [
            Change(name, before[name], now[name])
            for name in before
            if name in now and before[name] != now[name]
        ]
    return found


def as_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the compile arguments and the settings of layers as texts by name, in the form that
    `compare` uses."""
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
    """Returns one form of a loss or metric given by name, as a function, or as an object."""
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
    arguments = {
        name: each
        for name, each in settings.items()
        if name not in ("name", "dtype") and each not in _USUAL
    }
    return (
        {_OBJECT: _snake(value[_OBJECT]), "config": arguments}
        if arguments
        else _snake(value[_OBJECT])
    )


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
    """Returns True if a value is a number, not a schedule, for example."""
    try:
        float(text)
    except ValueError:
        return False
    return True
