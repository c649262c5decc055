"""What the code of a callback says about its attributes."""

from __future__ import annotations

import dis
import types
from collections.abc import Collection
from dataclasses import dataclass

import keras

from keras_distplug.python_state import script_code

_CLOCKS = frozenset(
    f"{clock}{unit}"
    for clock in ("perf_counter", "monotonic", "process_time", "thread_time", "default_timer")
    for unit in ("", "_ns")
)
_TIMES = _CLOCKS | {"time", "time_ns", "now", "utcnow"}
_STORES = frozenset({"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME"})
_EPOCH_HOOKS = frozenset({"on_epoch_begin", "on_train_begin"})
_BEFORE_TRAINING = frozenset({"__init__", "on_train_begin", "set_model", "set_params"})


@dataclass(frozen=True)
class Code:
    """What is known of the script's code in a callback.

    Args:
        clocks: Names that hold what a clock of this process has said.
        made_in_epochs: Attributes that are made when an epoch begins.
        stops_by_clock: Whether a function asks for the time and stops training.
        changed: Names that are assigned while a model is trained.
        made: Those that nothing assigns before, nor when an epoch begins.
        stored: For every function, the names of what it assigns.
    """

    clocks: frozenset[str]
    made_in_epochs: frozenset[str]
    stops_by_clock: bool
    changed: frozenset[str]
    made: frozenset[str]
    stored: tuple[frozenset[str], ...]

    def flags_beside(self, names: Collection[str]) -> frozenset[str]:
        """Names of what a function assigns that assigns one of `names`, too."""
        beside = [each for each in self.stored if not each.isdisjoint(names)]
        return frozenset().union(*beside)


def of(callback: keras.callbacks.Callback | keras.Model) -> Code:
    """Returns what the code of a callback, or of a model, says."""
    functions = list(script_code.functions_of(callback))

    def assigned(names: frozenset[str], *, is_in: bool) -> frozenset[str]:
        of_these = [each for each in functions if (each.__name__ in names) == is_in]
        return frozenset().union(*map(_assigned, of_these))

    changed = assigned(_BEFORE_TRAINING, is_in=False) - assigned(
        frozenset({"on_train_begin"}), is_in=True
    )
    return Code(
        clocks=frozenset().union(*map(_readings, functions)),
        made_in_epochs=assigned(_EPOCH_HOOKS, is_in=True),
        changed=changed,
        made=changed - assigned(_BEFORE_TRAINING | _EPOCH_HOOKS, is_in=True),
        stops_by_clock=any(
            "stop_training" in names and not _TIMES.isdisjoint(_called(function))
            for function in functions
            if (names := set(function.__code__.co_names))
        ),
        stored=tuple(map(_assigned, functions)),
    )


def _assigned(function: types.FunctionType) -> frozenset[str]:
    found = (script_code.stored(function.__code__, each) for each in sorted(_STORES))
    return frozenset().union(*found)


def _readings(function: types.FunctionType) -> frozenset[str]:
    """Names that are assigned the very result of a clock."""
    found: set[str] = set()
    is_reading = False
    for each in dis.get_instructions(function):
        if each.opname.startswith("LOAD_") and each.argval in _CLOCKS:
            is_reading = True
        elif each.opname in _STORES and is_reading:
            found.add(each.argval)
        elif not _passes_on(each.opname):
            is_reading = False
    return frozenset(found)


def _called(function: types.FunctionType) -> set[str]:
    """Names of functions that are called, as far as they are loaded for that."""
    found, name = set(), None
    for each in dis.get_instructions(function):
        if each.opname.startswith("LOAD_") and isinstance(each.argval, str):
            name = each.argval
        elif each.opname.startswith("CALL") and name is not None:
            found.add(name)
        elif each.opname not in ("PRECALL", "CACHE", "PUSH_NULL"):
            name = None
    return found


def _passes_on(operation: str) -> bool:
    loads = operation in ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "COPY", "SWAP", "PUSH_NULL")
    return loads or operation.startswith(("CALL", "PRECALL", "CACHE", "LOAD_FAST"))
