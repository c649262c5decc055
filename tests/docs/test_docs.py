"""The documentation's code runs, and the names in it exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from storage.checkpoints import RUN, Checkpoints
from stores.servers import moto
from support.cluster import ROOT, environment
from support.needed import is_installed, missing

import keras_distplug
from keras_distplug import cli
from keras_distplug.core import errors
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.files import Traits
from keras_distplug.storage.stores.local import LocalFiles

PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMES = [f"docs/{path.relative_to(ROOT / 'docs')}" for path in PAGES]
PUBLIC = [name for name in keras_distplug.__all__ if name not in ("__version__", "errors")]

_BLOCK = re.compile(
    r"(?P<not_run><!-- not run: (?P<why>[^\n]+) -->\n)?^```python\n(?P<shown>.*?)^```$"
    r"|^<!-- hidden\n(?P<hidden>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
TRACKERS = {"MlflowTracker": "mlflow", "WandbTracker": "wandb"}
_OTHER_CODES = {"0", "1", "2", "3", "124", "127"}  # of commands, in addition to `ExitCode`


# A page whose second block fails, in line 6 of the page.
WRONG = "<!-- hidden\nzero = 0\n-->\n\n```python\n1 / zero\n```\n"


def blocks(text: str) -> list[dict[str, Any]]:
    """Returns the Python blocks of a page that are run: shown ones and those in comments."""
    return [
        {
            "line": text.count("\n", 0, found.start("hidden" if found["hidden"] else "shown")) + 1,
            "code": found["hidden"] or found["shown"],
        }
        for found in _BLOCK.finditer(text)
        if found["not_run"] is None
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the outcome of every page and docstring, all run in one process, as TensorFlow starts
    slowly."""
    folder = tmp_path_factory.mktemp("docs")
    pages = [
        {"name": name, "blocks": blocks(path.read_text())}
        for name, path in zip(NAMES, PAGES, strict=True)
    ]
    pages.append({"name": "control", "blocks": blocks(WRONG)})
    (folder / "pages.json").write_text(json.dumps(pages))
    with ExitStack() as stack:
        place = stack.enter_context(moto(folder))
        options = place.options
        env = environment(
            {
                "AWS_ENDPOINT_URL": options["endpoint_url"],
                "AWS_ACCESS_KEY_ID": options["key"],
                "AWS_SECRET_ACCESS_KEY": options["secret"],
            }
        )
        script = Path(__file__).with_name("run_blocks.py")
        files = [str(folder / "pages.json"), str(folder / "results.json")]
        done = subprocess.run(
            [sys.executable, str(script), *files],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.stores
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", NAMES)
def test_pages_run(results: dict[str, Any], name: str) -> None:
    """All Python blocks of a page run, in their order."""
    assert results[name]["error"] is None, results[name]["error"]


@pytest.mark.stores
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(results: dict[str, Any], name: str) -> None:
    """Every public name has an example that runs; so do its methods' examples."""
    if name in TRACKERS and not is_installed(TRACKERS[name]):
        missing(TRACKERS[name], "Run pip install '.[test-trackers]'.")
    assert results[f"kd.{name}"]["blocks"]
    own = {key: value for key, value in results.items() if key.split(".")[:2] == ["kd", name]}
    assert not [each["error"] for each in own.values() if each["error"]], own


@pytest.mark.stores
@pytest.mark.timeout(1300)
def test_control(results: dict[str, Any]) -> None:
    """An error on a page is reported, with its line."""
    error = results["control"]["error"]
    assert "ZeroDivisionError" in error
    assert 'File "control", line 6' in error


@pytest.mark.stores
@pytest.mark.timeout(1300)
def test_example_of_the_package(results: dict[str, Any]) -> None:
    """The example in `help(keras_distplug)` runs."""
    assert results["kd.keras_distplug"] == {"blocks": 2, "error": None}


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_every_block_runs_or_says_why_not(path: Path) -> None:
    """Every Python block either runs or states why it does not."""
    text = path.read_text()
    found = [match for match in _BLOCK.finditer(text) if match["hidden"] is None]
    assert len(found) == len(re.findall(r"^\s*(?:```|~~~)\s*py", text, re.MULTILINE))
    assert text.count("<!-- hidden") == len(list(_BLOCK.finditer(text))) - len(found)
    assert text.count("<!-- not run") == len([each for each in found if each["not_run"]])


def test_few_blocks_are_not_run() -> None:
    """Only a few blocks are not run, because they need something that tests lack."""
    texts = [path.read_text() for path in PAGES]
    assert sum(text.count("<!-- not run") for text in texts) <= 2
    assert sum(len(blocks(text)) for text in texts) > 20


def _commands() -> Iterator[tuple[str, str]]:
    for name, path in zip(NAMES, PAGES, strict=True):
        for block in re.findall(r"^```sh\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("keras-distplug "):
                    yield name, line


@pytest.mark.parametrize(("name", "line"), list(_commands()))
def test_commands_exist(name: str, line: str) -> None:
    """Commands that are shown have only existing options."""
    arguments = shlex.split(line, comments=True)[1:]
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    cli._parser().parse_args(arguments)


def _slug(heading: str) -> str:
    text = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
    return re.sub(r"[-\s]+", "-", text)


def _anchors(path: Path) -> set[str]:
    text = _FENCED.sub("", path.read_text())
    return {_slug(each) for each in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links(path: Path) -> None:
    """Links lead to existing pages and headings."""
    text = _FENCED.sub("", path.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there in PAGES or (there.suffix == ".png" and there.exists()), target
        assert not anchor or anchor in _anchors(there) or there.name == "api.md", target


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_files(path: Path) -> None:
    """Files of the project that a page names exist."""
    folders = "examples|tests|benchmarks|keras_distplug|docs"
    for name in re.findall(rf"(?:`|python )((?:{folders})/[\w./-]+)", path.read_text()):
        assert (ROOT / name).exists(), name


def test_reference_is_complete() -> None:
    """The page api.md has every public name, and no other one."""
    text = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^::: keras_distplug\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted([*PUBLIC, "errors"])


# The page about problems


@cache
def _troubleshooting() -> str:
    return (ROOT / "docs" / "troubleshooting.md").read_text()


def test_every_error_is_explained() -> None:
    """Every error class has its own heading."""
    classes = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.DistplugError)
    ]
    headings = re.findall(r"^### (\w+)$", _troubleshooting(), re.MULTILINE)
    assert sorted(headings) == sorted(classes)


def test_every_exit_code_is_explained() -> None:
    """The table has every exit code of a process or a command."""
    codes = re.findall(r"^\| (\d+) \|", _troubleshooting(), re.MULTILINE)
    assert set(codes) == {str(int(code)) for code in ExitCode} | _OTHER_CODES
    assert len(codes) == len(set(codes))


@cache
def _texts() -> str:
    """Returns all strings of the package, with `…` for inserted values."""
    found = []
    for path in Path(keras_distplug.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        each.value if isinstance(each, ast.Constant) else "…"
                        for each in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_explained_messages_exist() -> None:
    """Every message that is explained exists in the package."""
    messages = re.findall(r"^> (.+)$", _troubleshooting(), re.MULTILINE)
    assert len(messages) > 25
    assert not [each for each in messages if each not in _texts()]


# The page about files


class _SmallFiles(LocalFiles):
    """Files so small that a checkpoint needs many of them."""

    @property
    def traits(self) -> Traits:
        return Traits(file_bytes=100, at_once=1, is_near=True)


def test_reader_of_the_page(tmp_path: Path) -> None:
    """The page's code reads variables of any type, distributed over several shards."""
    values = np.random.default_rng(0).normal(size=(7, 11))
    arrays = {
        "model/a": values.astype("float32"),
        "model/b": values.astype(ml_dtypes.bfloat16),
        "model/c": (values + 1j).astype("complex64"),
        "model/none": np.zeros((0, 3), "float16"),
        "optimizer/iteration": np.array(42),
    }
    store = Checkpoints(_SmallFiles(tmp_path))
    store.save(TrainState(Cursor(1, 2, 42), arrays))
    names: dict[str, Any] = {}
    exec(blocks((ROOT / "docs" / "file_format.md").read_text())[0]["code"], names)
    manifest, found = names["read"](tmp_path / RUN / "step-00000042")
    assert len(manifest["shards"]) > 10
    assert list(found) == list(arrays)
    for key, array in arrays.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape)
        assert found[key].tobytes() == array.tobytes(), key


# The site


@pytest.mark.ci  # needs a package that `[test]` does not install
def test_strict_build(tmp_path: Path) -> None:
    """The site is built without warnings about links, anchors and docstrings."""
    if not all(map(importlib.util.find_spec, ("mkdocs", "mkdocstrings_handlers"))):
        missing("mkdocs, with mkdocstrings,", "Run pip install '.[docs]'.")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    page = (tmp_path / "site" / "api" / "index.html").read_text()
    assert not [name for name in PUBLIC if f'id="keras_distplug.{name}"' not in page]
