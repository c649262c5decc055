"""The house: imports run one way, private names stay in one room, importing is light."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import environment

import keras_distplug

PACKAGE = Path(keras_distplug.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FLOOR = {"core": 0, "compat": 1, "strategies": 2, "training": 2, "storage": 2, "cluster": 2} | {
    "callbacks": 3,
    "supervisor": 3,
    "page": 1,
    "commands": 3,
    "tensorboard_plugin": 3,
    "default_callbacks": 4,
    "startup": 4,
    "fit": 5,
    "cli": 5,
    "__init__": 6,
    "__main__": 6,
}
WITHOUT_TENSORFLOW = (
    "core",
    "storage",
    "supervisor",
    "page",
    "commands",
    "tensorboard_plugin",
    "cli",
)


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in it, but for type checkers."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def rooms_used(path: Path) -> set[str]:
    used = set()
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "keras_distplug" and rest and rest.split(".")[0] in FLOOR:
            used.add(rest.split(".")[0])
    return used


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    """A room imports rooms below it; those beside it come in as arguments."""
    here = room(path.relative_to(PACKAGE).parts)
    for other in rooms_used(path) - {here}:
        allowed = FLOOR[other] < FLOOR[here]
        if here == "supervisor":
            allowed = other == "core" or other == "cluster"
        if here == "tensorboard_plugin":
            allowed = other in ("core", "page", "storage")
        if here == "commands":
            makes_models = path.name in ("export.py", "modules.py", "replay.py")
            allowed = other in ("core", "page", "storage", *(["compat", "training"] * makes_models))
        assert allowed, f"{path.relative_to(PACKAGE)} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_stay_in_compat(path: Path) -> None:
    """Only compat/ touches what Keras and TensorFlow do not export."""
    private = [
        name
        for name in imports(path)
        if name.startswith(("keras.src", "tensorflow.python", "tensorflow.core"))
    ]
    if room(path.relative_to(PACKAGE).parts) != "compat":
        assert not private


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_who_may_load_what(path: Path) -> None:
    """core, storage, supervisor, commands, who they need, and notices load no TensorFlow; one file
    loads fsspec."""
    place = path.relative_to(PACKAGE)
    loaded = {name.partition(".")[0] for name in imports(path)}
    light = bool({"roles", "notices"} & set(place.parts))
    if light or room(place.parts) in WITHOUT_TENSORFLOW:
        assert not loaded & {"tensorflow", "keras"}
    if room(place.parts) == "core":
        assert loaded <= sys.stdlib_module_names | {"keras_distplug"}
    if place != Path("storage/remote.py"):
        assert "fsspec" not in loaded


def test_names_of_tests() -> None:
    """Of two test modules of one name, pytest takes one for the other."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.tf
def test_public_names() -> None:
    """`__all__` is what there is, each name can be had, and no other one."""
    assert sorted(keras_distplug.__all__) == keras_distplug.__all__
    for name in keras_distplug.__all__:
        assert getattr(keras_distplug, name) is not None
    assert set(keras_distplug.__all__) <= set(dir(keras_distplug))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = keras_distplug.nothing


@pytest.mark.tf
def test_hints_of_public_names() -> None:
    """Editors show what each public function and method takes and gives; none is left open, or
    names what is not there."""
    for name in set(keras_distplug.__all__) - {"__version__", "errors"}:
        value = getattr(keras_distplug, name)
        functions = [value]
        if isinstance(value, type):
            own = [each for key, each in vars(value).items() if not key.startswith("_")]
            functions = [value.__init__, *filter(inspect.isfunction, own)]
        for function in functions:
            hints = typing.get_type_hints(function)
            named = {*inspect.signature(function).parameters, "return"} - {"self"}
            assert named <= set(hints), f"{name}, {function.__qualname__}"


@pytest.mark.parametrize(
    "module",
    [
        "keras_distplug",
        "keras_distplug.cli",
        "keras_distplug.commands.arguments",
        "keras_distplug.cluster.notices.clouds",
        "keras_distplug.cluster.notices.watcher",
    ],
)
def test_importing_is_light(module: str) -> None:
    """Importing the package, the command line, or notices, loads no TensorFlow, Keras or NumPy."""
    heavy = "{'tensorflow', 'keras', 'numpy', 'fsspec'}"
    code = f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr
