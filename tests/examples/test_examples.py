"""Examples run as a user would start them, and keep their promises."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.cluster import ROOT, environment, run_job, run_workers

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 450.0
# Records which worker writes which file, in every Python process that can import it.
WHO_WRITES = """
import json, os, sys

def hear(event, of):
    if event == "open" and str(of[0]).endswith(".keras") and "w" in (of[1] or ""):
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        with open(os.environ["WRITTEN"], "a") as file:
            print(index, os.path.abspath(of[0]), file=file)

sys.addaudithook(hear)
"""

cluster = pytest.mark.cluster
limited = pytest.mark.timeout(3 * TIMEOUT_S)


def run(
    folder: Path,
    name: str,
    *arguments: str,
    by: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> str:
    """Runs an example and returns its output, if it succeeds.

    Args:
        folder: The working directory.
        name: The name of the example.
        arguments: Its arguments.
        by: The number of workers for `keras-distplug run`, and its options; empty for one process.
        env: Additional environment variables.

    """
    command = [str(EXAMPLES / name), *arguments]
    # Not MNIST that the user of this machine may have: scikit-learn's data set is smaller.
    env = {"KERAS_HOME": str(folder / "keras"), **(env or {})}
    given = {"env": env, "cwd": folder, "timeout_s": TIMEOUT_S}
    if by:
        ended = run_job(command, int(by[0]), *by[1:], **given)
    else:
        [ended] = run_workers(command, 1, **given)
    assert ended.returncode == 0, ended.output
    return ended.output


def accuracies(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"test accuracy (\d\.\d+)", printed)]


def epochs(printed: str) -> list[str]:
    """Returns the epochs that Keras reports as trained, without duplicates."""
    return sorted(set(re.findall(r"Epoch (\d+/\d+)", printed)))


@cluster
@limited
def test_mirrored(tmp_path: Path) -> None:
    """Two replicas in one process learn to read."""
    printed = run(tmp_path, "mirrored.py")
    assert "2 replicas" in printed
    [accuracy] = accuracies(printed)
    assert accuracy > 0.85
    assert len(epochs(printed)) == 5


@cluster
@limited
def test_continued(tmp_path: Path) -> None:
    """The second start continues after the epochs of the first, the third has nothing to do, and
    the result is bit for bit that of an uninterrupted training."""
    last = []
    for epochs_asked, trained in (("2", ["1/2", "2/2"]), ("4", ["3/4", "4/4"]), ("4", [])):
        printed = run(tmp_path, "continued.py", "--epochs", epochs_asked)
        assert epochs(printed) == trained, printed
        last.append(printed.splitlines()[-5:])
    assert "this run is finished (4 epochs)" in printed
    at_once = run(tmp_path, "continued.py", "--epochs", "4", "--directory", "runs/uninterrupted")
    assert epochs(at_once) == ["1/4", "2/4", "3/4", "4/4"]
    assert last[1] == last[2] == at_once.splitlines()[-5:]
    assert last[0][-1] != last[1][-1]
    assert "sha256" in last[1][-1]
    assert accuracies(at_once)[0] > 0.85


@cluster
@limited
def test_chief_only(tmp_path: Path) -> None:
    """Two workers continue from the chief's file of the previous epoch. No other worker writes
    one."""
    (tmp_path / "sitecustomize.py").write_text(WHO_WRITES)
    env = environment()
    env = {
        "PYTHONPATH": f"{tmp_path}:{env['PYTHONPATH']}",
        "WRITTEN": str(tmp_path / "written"),
    }
    files: dict[str, int] = {}
    for asked, begin in (("2", 0), ("4", 2)):
        printed = run(tmp_path, "chief_only.py", "--epochs", asked, by=("2",), env=env)
        assert f"starting after epoch {begin}:" in printed
        assert epochs(printed) == [f"{n}/{asked}" for n in range(begin + 1, int(asked) + 1)]
        folder = tmp_path / "runs" / "chief_only"
        found = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert sorted(found) == [f"epoch-{n:03d}.keras" for n in range(1, int(asked) + 1)]
        assert files.items() <= found.items()
        files = found
    assert accuracies(printed)[0] > 0.85
    written = [line.split() for line in (tmp_path / "written").read_text().splitlines()]
    assert {index for index, path in written if folder in Path(path).parents} == {"0"}
    assert {index for index, _ in written} == {"0", "1"}  # the other one writes to scratch


@cluster
@limited
def test_exact_resume(tmp_path: Path) -> None:
    """A kill mid-epoch makes no difference."""
    printed = run(tmp_path, "exact_resume.py", "--kills", "1")
    assert "killed: kill 1 of 1" in printed
    same = re.search(r"identical arrays: (\d+) of (\d+)\. History and callbacks: the same", printed)
    assert same is not None, printed
    assert same[1] == same[2] != "0"


@cluster
@limited
@pytest.mark.parametrize(
    ("strategy", "by"),
    [
        ("mirrored", ()),
        ("central_storage", ()),
        ("multi_worker", ("2",)),
        ("parameter_server", ("2", "--ps", "1")),
    ],
)
def test_residual(tmp_path: Path, strategy: str, by: tuple[str, ...]) -> None:
    """The residual network learns under every strategy."""
    arguments = ("--strategy", strategy, "--samples", "960")
    printed = run(tmp_path, "residual.py", *arguments, by=by)
    assert f"strategy {strategy} " in printed
    found = accuracies(printed)
    assert len(found) == (2 if strategy == "multi_worker" else 1)
    assert min(found) > 0.5, found  # by chance 0.1


# The data


def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", EXAMPLES / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def home(path: Path, pixels: int) -> Path:
    """A Keras folder with an MNIST of five pictures, three of them for training."""
    (path / "datasets").mkdir(parents=True)
    x = np.zeros((5, pixels, pixels), "uint8")
    x[:, 0, 0] = 255
    y = np.arange(5, dtype="uint8")
    np.savez(
        path / "datasets" / "mnist.npz", x_train=x[:3], y_train=y[:3], x_test=x[3:], y_test=y[3:]
    )
    return path


@pytest.mark.parametrize("is_there", [True, False])
def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """MNIST is loaded if Keras has it, otherwise scikit-learn's digits, with the same types."""
    monkeypatch.setenv("KERAS_HOME", str(home(tmp_path, 28) if is_there else tmp_path))
    (x_train, y_train), (x_test, y_test) = digits().load()
    shapes = [each.shape for each in (x_train, y_train, x_test, y_test)]
    if is_there:
        assert shapes == [(3, 28, 28, 1), (3,), (2, 28, 28, 1), (2,)]
        assert y_test.tolist() == [3, 4]
    else:
        assert shapes == [(1500, 8, 8, 1), (1500,), (297, 8, 8, 1), (297,)]
        assert set(y_train) == set(y_test) == set(range(10))
    for x, y in ((x_train, y_train), (x_test, y_test)):
        assert (x.dtype, y.dtype) == ("float32", "int64")
        assert (x.min(), x.max()) == (0.0, 1.0)


def test_location_of_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The location is that of `keras.datasets.mnist`, also in the user's home folder."""
    monkeypatch.delenv("KERAS_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    home(tmp_path / ".keras", 28)
    assert digits().load()[0][0].shape == (3, 28, 28, 1)
