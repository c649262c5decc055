from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from support.cluster import environment

from keras_distplug.backend.tensorflow.runtime import versions
from keras_distplug.core.errors import VersionError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_lowest_versions_match_pyproject() -> None:
    """pyproject.toml and the check at run time have the same lower bounds."""
    extras = PROJECT["optional-dependencies"]
    declared = {*PROJECT["dependencies"], *extras["tensorflow"], *extras["tensorflow-cpu"]}
    for name in ("keras", "tensorflow", "tensorflow-cpu"):
        low, _ = versions.TESTED[name.removesuffix("-cpu")]
        assert f"{name}>={'.'.join(map(str, low))}" in declared


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    """Simulates that only these distributions are installed, and nothing is imported yet."""

    monkeypatch.setattr(versions, "_installed", lambda name: installed.get(name.replace("-", "_")))
    monkeypatch.setattr(versions, "_loaded", lambda name: None)
    versions._warn_once.cache_clear()


@pytest.mark.parametrize("tensorflow", ["2.18.1", "2.21.0", "2.20.0rc0"])
@pytest.mark.parametrize("keras", ["3.10.0", "3.15.1"])
def test_tested_versions(monkeypatch: pytest.MonkeyPatch, tensorflow: str, keras: str) -> None:
    """Every version in the range passes without a warning."""
    pretend(monkeypatch, tensorflow=tensorflow, keras=keras)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check()


@pytest.mark.parametrize(
    "distribution",
    ["tensorflow_cpu", "tensorflow_intel", "tensorflow_macos", "tf_nightly", "tf_nightly_cpu"],
)
def test_other_distributions(monkeypatch: pytest.MonkeyPatch, distribution: str) -> None:
    """Every build of TensorFlow counts as TensorFlow, and messages use its own name."""
    name = distribution.replace("_", "-")
    pretend(monkeypatch, **{distribution: "2.21.0"}, keras_nightly="3.15.0.dev2026010103")
    versions.check()
    assert versions.describe().startswith(f"keras-nightly 3.15.0.dev2026010103, {name} 2.21.0 and")
    pretend(monkeypatch, **{distribution: "2.17.1"}, keras="3.15.0")
    with pytest.raises(VersionError, match=f'^{name} 2.17.1 .*pip install "{name}>='):
        versions.check()


def test_distributions_that_overwrite_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two distributions of one module are installed, the one whose files are loaded counts."""
    pretend(monkeypatch, keras="3.15.1", keras_nightly="3.16.0.dev2026102704", tensorflow="2.21.0")
    monkeypatch.setattr(versions, "_loaded", {"keras": "3.16.0.dev2026102704"}.get)
    assert str(versions.find("keras")) == "keras-nightly 3.16.0.dev2026102704"
    monkeypatch.setattr(versions, "_loaded", {"keras": "3.15.1"}.get)
    assert str(versions.find("keras")) == "keras 3.15.1"


@pytest.mark.parametrize(
    ("installed", "complaint"),
    [
        ({"tensorflow": "2.17.1", "keras": "3.10.0"}, r"tensorflow 2\.17\.1 is installed"),
        ({"tensorflow": "2.18.1", "keras": "3.9.2"}, r"keras 3\.9\.2 is installed"),
        ({"tensorflow": "2.18.1"}, "keras is not installed.*`pip install keras`"),
    ],
)
def test_refused(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], complaint: str
) -> None:
    """A missing or outdated package is an error that says what to install."""
    pretend(monkeypatch, **installed)
    with pytest.raises(VersionError, match=complaint) as raised:
        versions.check()
    assert "pip install" in str(raised.value)


def check_twice() -> None:
    versions.check()
    versions.check()


@pytest.mark.parametrize(
    ("installed", "newer"),
    [
        ({"tensorflow": "2.99.0", "keras": "3.10.0"}, r"tensorflow 2\.99\.0"),
        ({"tensorflow_cpu": "2.99.0rc1", "keras": "3.10.0"}, r"tensorflow-cpu 2\.99\.0rc1"),
        ({"tensorflow": "2.18.1", "keras": "3.99.0"}, r"keras 3\.99\.0"),
        ({"tensorflow": "2.18.1", "keras_nightly": "3.99.0.dev1"}, r"keras-nightly 3\.99\.0"),
    ],
)
def test_newer_versions(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], newer: str
) -> None:
    """A version newer than the tested ones causes one warning, or an error if requested."""
    pretend(monkeypatch, **installed)
    with pytest.warns(UserWarning, match=newer + r".* was tested with, \w+>=\d") as caught:
        check_twice()
    assert len(caught) == 1
    monkeypatch.setenv(versions.STRICT, "1")
    with pytest.raises(VersionError, match=newer + ".*STRICT_VERSIONS is 1.*pip install"):
        versions.check()


def test_other_import_errors() -> None:
    """A failed import outside Keras' and TensorFlow's private modules is not explained."""
    assert versions.explain(ModuleNotFoundError("No module named 'mine'", name="mine")) is None
    assert versions.explain(ImportError("cannot import name 'x'")) is None


KERAS_3_99 = """
import warnings

import keras
import numpy as np
from keras.src.trainers import epoch_iterator

keras.__version__ = "3.99.0"
import keras_distplug as kd

private = epoch_iterator.EpochIterator
del epoch_iterator.EpochIterator
try:
    kd.defaults
except kd.errors.VersionError as error:
    for part in ("EpochIterator", " 3.99.0", kd.__version__, "issue tracker"):
        assert part in str(error), (part, str(error))
else:
    raise AssertionError("a private name was missing")
epoch_iterator.EpochIterator = private

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((8, 2))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for epochs in (1, 2):
        fitted = model.fit(x, x[:, :1], epochs=epochs, verbose=0, callbacks=kd.defaults("run"))
newer = [str(each.message) for each in caught if " 3.99.0 is newer" in str(each.message)]
assert len(newer) == 1, newer
assert fitted.epoch == [0, 1], fitted.epoch
"""


@pytest.mark.tf
def test_keras_3_99(tmp_path: Path) -> None:
    """A future Keras version trains with a warning; a missing private name is an error."""
    ran = subprocess.run(
        [sys.executable, "-c", KERAS_3_99],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
