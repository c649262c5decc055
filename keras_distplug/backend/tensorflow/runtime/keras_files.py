"""Looks up names in the files of the installed Keras without importing it.

Importing Keras imports TensorFlow, which takes 500 MB and several seconds. In Keras 3.10 to 3.15,
`keras/layers/__init__.py` and similar files import public names from `keras.src`, where they are
defined at the top level of a file.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["class", "function"]

_MODULE = re.compile(r"keras(\.[A-Za-z]\w*)*")
_DEFINITION = re.compile(r"^(class|def)[ \t]+(\w+)", re.MULTILINE)
_MOST_IMPORTS = 5  # to follow from the public name to its definition
# Names that every supported version has, for checking that the file layout is a known one.
_EXAMPLES: tuple[tuple[str, str, Kind], ...] = (
    ("keras", "Sequential", "class"),
    ("keras.layers", "Dense", "class"),
    ("keras.losses", "mean_squared_error", "function"),
    ("keras.activations", "relu", "function"),
    ("keras.optimizers.schedules", "CosineDecay", "class"),
    ("keras.src.models.functional", "Functional", "class"),
)


@dataclass(frozen=True)
class KerasFiles:
    """The names defined in Keras' files.

    Args:
        folder: The folder of the package `keras`.
    """

    folder: Path

    def kind(self, module: str, name: str) -> Kind | None:
        """Returns the kind of an object in a Keras module.

        Args:
            module: The full name of the module, public or below `keras.src`.
            name: A name in the module.

        Returns:
            `"class"` or `"function"`; None if the module has no class or function of this name. In
            a private module, only names that it defines itself are found.
        """
        return _kind(self.folder, module, name, _MOST_IMPORTS)


def find() -> KerasFiles | None:
    """Finds the installed Keras; returns None if its file layout is unknown."""
    try:
        spec = importlib.util.find_spec("keras")
    except ValueError:  # a module in `sys.modules` that has no spec
        return None
    if spec is None or spec.origin is None:
        return None
    files = KerasFiles(Path(spec.origin).parent)
    is_known = all(files.kind(module, name) == kind for module, name, kind in _EXAMPLES)
    return files if is_known else None


def _kind(folder: Path, module: str, name: str, imports_left: int) -> Kind | None:
    file = _get_file(folder, module)
    if file is None or not imports_left:
        return None
    if (kind := _definitions(file).get(name)) is not None:
        return kind
    is_private = module.startswith("keras.src.") and imports_left == _MOST_IMPORTS
    source = None if is_private else _imports(file).get(name)
    return None if source is None else _kind(folder, *source, imports_left - 1)


@functools.cache
def _get_file(folder: Path, module: str) -> Path | None:
    if not _MODULE.fullmatch(module):
        return None
    path = folder.joinpath(*module.split(".")[1:])
    for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if file.is_file():
            return file
    return None


@functools.cache
def _definitions(file: Path) -> dict[str, Kind]:
    # `ast` takes seconds for the largest files.
    found = _DEFINITION.findall(_get_text(file))
    return {name: "class" if word == "class" else "function" for word, name in found}


@functools.cache
def _imports(file: Path) -> dict[str, tuple[str, str]]:
    """Returns the source module and original name of every `from ... import ...` in a file."""
    try:
        body = ast.parse(_get_text(file)).body
    except (SyntaxError, ValueError):
        return {}
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in body
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module
        for alias in node.names
    }


def _get_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
