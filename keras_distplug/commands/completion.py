"""Completion with the Tab key in bash, zsh and fish, by the optional package argcomplete."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from keras_distplug.core.errors import ConfigurationError, DistplugError

PROGRAM = "keras-distplug"
SHELLS = ("bash", "zsh", "fish")


def run(parsed: argparse.Namespace) -> int:
    """Prints the script that a shell evaluates.

    Raises:
        ConfigurationError: If argcomplete is not installed.
    """
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError as error:
        raise ConfigurationError(
            "Shell completion needs the package argcomplete, which is not installed. Run "
            "`pip install argcomplete` in the environment of keras-distplug, then try again."
        ) from error
    sys.stdout.write(argcomplete.shellcode([PROGRAM], shell=parsed.shell) + "\n")
    return 0


def answer(parser: argparse.ArgumentParser) -> None:
    """Answers the shell and exits, if a shell asks for completions; does nothing otherwise."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:
        sys.exit(0)
    argcomplete.autocomplete(parser)


def attach(action: argparse.Action, completer: Callable[..., list[str]]) -> None:
    """Gives an argument a function that returns its possible values."""
    action.completer = completer  # type: ignore[attr-defined]


def runs(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Returns the names of the runs in a local DIRECTORY."""
    return _names(parsed_args, lambda location: location.run_names())


def checkpoints(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Returns the names of the checkpoints in a local DIRECTORY."""

    def names(location: Any) -> list[str]:
        from keras_distplug.storage import layout

        found = [location.run] if location.run else location.run_names()
        return [place.name for run in found for place in layout.places(location.files, run)]

    return _names(parsed_args, names)


def _names(parsed: argparse.Namespace, of: Callable[[Any], list[str]]) -> list[str]:
    from keras_distplug.commands import locations
    from keras_distplug.storage.files import local_path

    directory = getattr(parsed, "directory", None)
    if directory is None or local_path(directory) is None:
        return []  # the Tab key does not wait for a store
    given = argparse.Namespace(
        directory=directory, storage_options={}, run=getattr(parsed, "run", None), step=None
    )
    try:
        return of(locations.of(given))
    except (DistplugError, OSError):
        return []
