"""The package's structure: imports run one way, private names stay in one folder, importing is
light."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import re
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
# What the files of every room (a folder or top-level module) may import, in addition to their own
# room. Features may import none of each other, except checkpoint and runlog.
FEATURES = {"preemption", "hang", "nonfinite", "replicas", "checkpoint", "runlog"}
TENSORFLOW = {"backend.runtime", "backend.input", "backend.replicas", "backend.parameter_server"}
BACKEND = TENSORFLOW | {"backend.trainer"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "backend": set(),
    "backend.runtime": {"core"},
    "backend.input": {"core", "backend.runtime"},
    "backend.replicas": {"core", "backend.runtime", "backend.input"},
    "backend.parameter_server": {"core", "backend.runtime", "backend.input", "backend.replicas"},
    "backend.trainer": {"core", *TENSORFLOW},
    "storage": {"core"},
    "trackers": {"core", "storage"},
    "cluster": {"core", "backend.runtime"},
    "strategies": {"core", "backend.runtime", "backend.parameter_server"},
    "python_state": {"core", *BACKEND},
    "data": {"core", *BACKEND, "python_state"},
    "step": {"core", *BACKEND, "cluster", "storage"},
    "callbacks": {"core", *BACKEND, "cluster", "storage"},
}
GROUND = set(MAY_IMPORT) - {"backend"}
MAY_IMPORT |= {
    "runlog": GROUND,
    "checkpoint": GROUND | {"runlog"},
    **{
        feature: GROUND | {"checkpoint", "runlog"}
        for feature in FEATURES - {"runlog", "checkpoint"}
    },
    "startup": GROUND,
    "default_callbacks": GROUND | FEATURES,
    "fit": GROUND | FEATURES | {"startup", "default_callbacks"},
    "supervisor": {"core", "cluster"},
    "page": set(),
    "tensorboard_plugin": {"core", "storage", "runlog", "page"},
    "commands": GROUND | FEATURES | {"page"},
    "cli": {"core", "storage", "runlog", "commands", "supervisor", "__init__"},
    "__init__": GROUND | FEATURES | {"startup", "default_callbacks", "fit"},
    "__main__": {"cli"},
}
# Rooms that are used in processes that must not load TensorFlow.
WITHOUT_TENSORFLOW = (
    "core",
    "storage",
    "trackers",
    "supervisor",
    "page",
    "commands",
    "tensorboard_plugin",
    "cli",
)

REMOTE_STORES = ("remote.py", "object_store.py", "sftp.py")


@functools.cache
def imports(path: Path, *, at_import: bool = False) -> tuple[str, ...]:
    """Returns the modules that a file imports, except for type checking: anywhere, or at import
    only."""
    return tuple(_imports(path, at_import))


def _imports(path: Path, at_import: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    if at_import:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.body = []
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


def room(module: str) -> str:
    """Returns the room of a module of the package: its folder, or its name if it is in none."""
    parts = module.removeprefix("keras_distplug").split(".")[1:]
    if not parts:
        return "__init__"
    if parts[0] == "backend" and len(parts) > 2:
        return f"backend.{parts[2]}"
    return parts[0]


def get_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {get_name(path): path for path in FILES}


def modules_used(path: Path, *, at_import: bool = False) -> set[str]:
    """Returns the modules of the package that a file imports anywhere, or at import only."""
    return {name for name in imports(path, at_import=at_import) if name in MODULES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    here = room(get_name(path))
    used = {room(each): each for each in modules_used(path) - {"keras_distplug"}}
    for other in used.keys() - MAY_IMPORT[here] - {here, "backend"}:
        pytest.fail(f"{path.relative_to(PACKAGE)} imports {used[other]}")


def test_rooms_have_no_cycles() -> None:
    """Imports between rooms have no cycles."""
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()


def test_modules_have_no_cycles() -> None:
    """Imports between modules have no cycles, either."""
    graphlib.TopologicalSorter(
        {
            name: {each for each in modules_used(path) if each != name and not _is_folder(each)}
            for name, path in MODULES.items()
            if not _is_folder(name)
        }
    ).prepare()


def _is_folder(module: str) -> bool:
    return MODULES[module].name == "__init__.py"


def test_unique_names_of_files() -> None:
    """File names are unique, without their folders."""
    names = [path.name for path in FILES if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_stay_in_the_backend(path: Path) -> None:
    """Only backend/ uses private names of Keras and TensorFlow."""
    private = [
        name
        for name in imports(path)
        if name.startswith(("keras.src", "tensorflow.python", "tensorflow.core"))
    ]
    if not room(get_name(path)).startswith("backend"):
        assert not private
    assert not any(name.startswith("unittest") for name in imports(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_without_heavy_imports(path: Path) -> None:
    """Modules that run alongside training do not load TensorFlow; only remote stores load
    fsspec."""
    place = path.relative_to(PACKAGE)
    light = bool({"roles", "notices", "trusted_config.py", "keras_files.py"} & set(place.parts))
    if light or room(get_name(path)) in WITHOUT_TENSORFLOW:
        assert not loaded_with(get_name(path)) & {"tensorflow", "keras"}
    loaded = {name.partition(".")[0] for name in imports(path)}
    if room(get_name(path)) == "core":
        assert loaded <= sys.stdlib_module_names | {"keras_distplug"}
    if place.parent != Path("storage/stores") or place.name not in REMOTE_STORES:
        assert "fsspec" not in loaded


def loaded_with(module: str) -> set[str]:
    """Returns the packages that are loaded when a module of ours is imported."""
    left, seen, loaded = [module], set[str](), set[str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        loaded |= {each.partition(".")[0] for each in imports(MODULES[name], at_import=True)}
        left += modules_used(MODULES[name], at_import=True)
    return loaded


def test_page() -> None:
    """The page for contributors names every folder, and only existing files."""
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    for folder in sorted(
        path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()
    ):
        assert f"{folder}/" in page, folder
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert (PACKAGE / name).exists() or (PACKAGE.parent / name).exists(), name


def test_unique_names_of_test_modules() -> None:
    """Names of test modules are unique: pytest would confuse modules with the same name."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.tf
def test_public_names() -> None:
    """`__all__` is sorted, all of its names exist, and other names raise AttributeError."""
    assert sorted(keras_distplug.__all__) == keras_distplug.__all__
    for name in keras_distplug.__all__:
        assert getattr(keras_distplug, name) is not None
    assert set(keras_distplug.__all__) <= set(dir(keras_distplug))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = keras_distplug.nothing


@pytest.mark.tf
def test_type_hints_of_public_names() -> None:
    """Public functions and methods have complete type hints, whose names can be resolved."""
    for name in set(keras_distplug.__all__) - {"__version__", "errors"}:
        value = getattr(keras_distplug, name)
        functions = [value]
        if isinstance(value, type):
            own = [each for key, each in vars(value).items() if not key.startswith("_")]
            functions = list(filter(inspect.isfunction, own))
            if value.__init__ is not object.__init__:
                functions.append(value.__init__)
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
        "keras_distplug.preemption.notices.clouds",
        "keras_distplug.preemption.notices.watcher",
    ],
)
def test_importing_is_light(module: str) -> None:
    """Importing the package, the command line or notices loads no TensorFlow, Keras, NumPy or
    fsspec."""
    heavy = "{'tensorflow', 'keras', 'numpy', 'fsspec'}"
    code = f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr
