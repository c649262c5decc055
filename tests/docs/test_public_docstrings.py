"""Every public name has a complete docstring."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.cluster import ROOT

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|Reference)s?:$")
# The public names, and which of a class's methods the reference shows, if it says so.
_REFERENCE = re.compile(
    r"^::: (keras_distplug\S*)\n(?:    options:\n((?:      .*\n)+))?", re.MULTILINE
)


def _public() -> Iterator[tuple[str, Any, list[str] | None]]:
    """Returns every name in the reference, its object, and the methods that are shown with it."""
    for name, options in _REFERENCE.findall((ROOT / "docs" / "api.md").read_text()):
        module, _, attribute = name.rpartition(".")
        if (found := getattr(importlib.import_module(module), attribute)) and callable(found):
            members = re.search(r"members: \[(.*)\]", options)
            yield name, found, None if members is None else re.findall(r"\w+", members[1])


def _callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Returns public functions and classes, and the methods that the reference shows."""
    for name, found, members in _public():
        yield name, found
        for attribute, method in vars(found).items() if inspect.isclass(found) else ():
            if not inspect.isfunction(method) or attribute.startswith("_"):
                continue
            if attribute in members if members is not None else method.__doc__:
                yield f"{name}.{attribute}", method


CALLABLES = dict(_callables())


def sections(text: str) -> dict[str, str]:
    """Returns the text of every section of a docstring in Google style; the purpose is under ""."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(text).splitlines():
        if (heading := _SECTION.match(line)) is not None:
            current = heading[1].rstrip("s") if heading[1] == "Examples" else heading[1]
            found[current] = []
        elif line and not line.startswith(" ") and current:
            current = ""
            found[""].append(line)
        else:
            found[current].append(line)
    return {name: "\n".join(lines).strip() for name, lines in found.items()}


def _parameters(found: Callable[..., Any]) -> list[inspect.Parameter]:
    if getattr(found, "_is_protocol", False) or isinstance(found, enum.EnumMeta):
        return []  # users create no instance with arguments
    parameters = inspect.signature(found).parameters.values()
    return [each for each in parameters if each.name not in ("self", "cls")]


def problems(found: Callable[..., Any]) -> list[str]:
    """Returns the parts that a docstring lacks."""
    text = inspect.getdoc(found)
    if not text:
        return ["there is no docstring"]
    parts = sections(text)
    lacking = []
    if not re.match(r"[A-Z`].*[.:]$", parts[""].partition("\n\n")[0].replace("\n", " ")):
        lacking.append("the purpose is not a sentence")
    arguments = parts.get("Args", "") + "\n" + parts.get("Attributes", "")
    for parameter in _parameters(found):
        named = re.search(
            rf"(?m)^\s*(?:[\w*`, ]+, )?\**{re.escape(parameter.name)}\b.*:", arguments
        )
        if named is None:
            lacking.append(f"the argument {parameter.name} is not described")
    return lacking


@pytest.mark.parametrize("name", CALLABLES)
def test_complete(name: str) -> None:
    """A docstring states the purpose and describes every argument."""
    assert not problems(CALLABLES[name])


def test_incomplete() -> None:
    """An undescribed argument and a missing purpose are found."""

    def good(value: int) -> None:
        """Does something.

        Args:
            value: A number.
        """

    def bad(value: int) -> None:
        """does something"""

    def none() -> None:
        pass

    assert problems(good) == []
    assert problems(bad) == [
        "the purpose is not a sentence",
        "the argument value is not described",
    ]
    assert problems(none) == ["there is no docstring"]
