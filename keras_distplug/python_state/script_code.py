"""Distinguishes the script's own code from installed packages, and analyzes which attributes it
uses."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import site
import sys
import types
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from keras_distplug.backend.tensorflow.runtime import frames

_INSTALLED = (*frames.NOT_THE_USERS, site.getusersitepackages(), *site.getsitepackages())
_LIBRARIES = frozenset({"keras", "keras_distplug"})
OF_EVERY_CALLBACK = frozenset(vars(keras.callbacks.Callback()))
_CLOCKS = frozenset(
    f"{clock}{unit}"
    for clock in ("perf_counter", "monotonic", "process_time", "thread_time", "default_timer")
    for unit in ("", "_ns")
)
_TIMES = _CLOCKS | {"time", "time_ns", "now", "utcnow"}
_STORES = frozenset({"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME"})
# Instructions that may come between the result of a function and the store of it.
_PASSES = ("CALL", "PRECALL", "LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "COPY", "SWAP", "PUSH_NULL")
_EPOCH_HOOKS = frozenset({"on_epoch_begin", "on_train_begin"})
_BEFORE_TRAINING = frozenset({"__init__", "on_train_begin", "set_model", "set_params"})


def is_of_script(kind: type) -> bool:
    """Returns True if a class belongs to the script, not to an installed package."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return is_file_of_script(file) and not is_of_library(kind)


def is_of_library(kind: type) -> bool:
    """Returns True if a class is Keras', ours, or `object`."""
    return kind is object or kind.__module__.split(".")[0] in _LIBRARIES


def is_file_of_script(file: str | None) -> bool:
    """Returns True if a file belongs to the script."""
    return file is not None and not file.startswith((*_INSTALLED, "<frozen"))


def is_function_of_script(function: types.FunctionType) -> bool:
    """Returns True if a function belongs to the script."""
    return is_file_of_script(function.__code__.co_filename)


def attributes(owner: Any) -> list[tuple[str, Any]]:
    """Returns the contents of an object's `__dict__` and slots, by name."""
    found: list[tuple[str, Any]] = []
    with contextlib.suppress(AttributeError):
        found += dict(object.__getattribute__(owner, "__dict__")).items()
    for kind in type(owner).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # an empty slot
                    found.append((name, member.__get__(owner)))
    return found


def list_functions(owner: Any) -> Iterator[types.FunctionType]:
    """Yields functions of the script among the methods and attributes of an object."""
    kinds = [kind for kind in type(owner).__mro__ if not is_of_library(kind)]
    members = [member for kind in kinds for member in vars(kind).values()]
    for member in [*members, *(value for _, value in attributes(owner))]:
        member = member.func if type(member) is functools.partial else member
        if type(member) is types.FunctionType:
            member = inspect.unwrap(member)
        if type(member) is types.FunctionType and is_function_of_script(member):
            yield member


def mentioned_names(code: types.CodeType) -> Iterator[str]:
    """Yields names of globals and attributes that a function, or one within it, mentions."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from mentioned_names(each)


@functools.lru_cache(4096)  # by content; called at every save
def stored(code: types.CodeType, operation: str = "STORE_ATTR") -> frozenset[str]:
    """Returns names of attributes, or of globals, that a function or one within it assigns."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    own: Iterable[str] = ()
    if dis.opmap[operation] in code.co_code[::2]:  # most functions assign nothing
        own = _operands(code, operation)
    return frozenset(own).union(*(stored(each, operation) for each in inner))


def _operands(code: types.CodeType, operation: str) -> Iterator[str]:
    """Yields the operands of an operation on names. `dis` takes nine times as long."""
    wanted = dis.opmap[operation]
    if wanted not in dis.hasname:
        yield from (e.argval for e in dis.get_instructions(code) if e.opname == operation)
        return
    high = 0
    for each, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        index = high | low
        if each == wanted:
            yield code.co_names[index]
        high = index << 8 if each == dis.EXTENDED_ARG else 0


def attributes_set_by_script(owners: Iterable[Any]) -> set[str]:
    """Returns names of attributes that functions of the script in some objects may set."""
    names: set[str] = set()
    for function in (each for owner in owners for each in list_functions(owner)):
        names |= stored(function.__code__)
        if "setattr" in function.__code__.co_names:
            names.update(each for each in function.__code__.co_consts if isinstance(each, str))
    return names


def attributes_set_by_library(kind: type) -> frozenset[str]:
    """Returns names of the attributes that classes of Keras, or ours, set on their instances."""
    return _set_by(tuple(filter(is_of_library, kind.__mro__)))


@functools.cache
def _set_by(kinds: tuple[Hashable, ...]) -> frozenset[str]:
    return OF_EVERY_CALLBACK.union(
        name
        for each in kinds
        for function in vars(each).values()
        if isinstance(function, types.FunctionType)
        for name in stored(inspect.unwrap(function).__code__)
    )


@dataclass(frozen=True)
class Code:
    """Facts about the script's code in a callback.

    Args:
        clocks: Names assigned from a clock of this process.
        made_in_epochs: Attributes created at the start of an epoch.
        stops_by_clock: True if a function reads the time and stops training.
        changed: Names assigned while a model is trained.
        made: Those of `changed` assigned neither before training nor when an epoch starts.
        stored: For every function, the names that it assigns.
    """

    clocks: frozenset[str]
    made_in_epochs: frozenset[str]
    stops_by_clock: bool
    changed: frozenset[str]
    made: frozenset[str]
    stored: tuple[frozenset[str], ...]

    def companion_flags(self, names: Collection[str]) -> frozenset[str]:
        """Returns the names assigned by every function that assigns one of `names`."""
        related = [each for each in self.stored if not each.isdisjoint(names)]
        return frozenset().union(*related)


def find_code(callback: keras.callbacks.Callback | keras.Model) -> Code:
    """Analyzes the code of a callback, or of a model."""
    functions = list(list_functions(callback))

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
    found = (stored(function.__code__, each) for each in sorted(_STORES))
    return frozenset().union(*found)


def _readings(function: types.FunctionType) -> frozenset[str]:
    """Returns names that are assigned the direct result of a clock."""
    found: set[str] = set()
    is_reading = False
    for each in dis.get_instructions(function):
        if each.opname.startswith("LOAD_") and each.argval in _CLOCKS:
            is_reading = True
        elif each.opname in _STORES and is_reading:
            found.add(each.argval)
        elif not each.opname.startswith(_PASSES):
            is_reading = False
    return frozenset(found)


def _called(function: types.FunctionType) -> set[str]:
    """Returns names of called functions, as far as they are loaded directly before the call."""
    found, name = set(), None
    for each in dis.get_instructions(function):
        if each.opname.startswith("LOAD_") and isinstance(each.argval, str):
            name = each.argval
        elif each.opname.startswith("CALL") and name is not None:
            found.add(name)
        elif each.opname not in ("PRECALL", "CACHE", "PUSH_NULL"):
            name = None
    return found
