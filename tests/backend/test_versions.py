from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from keras_distplug.backend.tensorflow.runtime import versions
from keras_distplug.core.errors import VersionError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_ranges_are_those_of_the_package() -> None:
    """What is checked at run time is what pyproject.toml says."""
    extras = PROJECT["optional-dependencies"]
    declared = {
        *PROJECT["dependencies"],
        *(
            requirement
            for name in versions.TENSORFLOW_DISTRIBUTIONS
            for requirement in extras[name]
        ),
    }
    for name, (low, high) in versions.TESTED.items():
        names = versions.TENSORFLOW_DISTRIBUTIONS if name == "tensorflow" else (name,)
        for distribution in names:
            low_text, high_text = (".".join(map(str, version)) for version in (low, high))
            assert f"{distribution}>={low_text},<{high_text}" in declared


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name.replace("-", "_")]

    monkeypatch.setattr(versions.metadata, "version", version)


@pytest.mark.parametrize("tensorflow", ["2.18.1", "2.21.0", "2.20.0rc0"])
@pytest.mark.parametrize("keras", ["3.10.0", "3.15.1"])
def test_tested_versions(monkeypatch: pytest.MonkeyPatch, tensorflow: str, keras: str) -> None:
    """Every version in the range passes."""
    pretend(monkeypatch, tensorflow=tensorflow, keras=keras)
    versions.check()


def test_tensorflow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU build counts as TensorFlow."""
    pretend(monkeypatch, tensorflow_cpu="2.21.0", keras="3.15.1")
    versions.check()


@pytest.mark.parametrize(
    ("installed", "complaint"),
    [
        ({"tensorflow": "2.17.1", "keras": "3.10.0"}, r"tensorflow 2\.17\.1 is installed"),
        ({"tensorflow": "2.22.0", "keras": "3.10.0"}, r"tensorflow 2\.22\.0 is installed"),
        (
            {"tensorflow_cpu": "2.22.0", "keras": "3.10.0"},
            r'tensorflow-cpu 2\.22\.0 is .*pip install "tensorflow-cpu>=2\.18\.1,<2\.22"',
        ),
        ({"tensorflow": "2.18.1", "keras": "3.9.2"}, r"keras 3\.9\.2 is installed"),
        ({"tensorflow": "2.18.1", "keras": "3.16.0"}, r"keras 3\.16\.0 is installed"),
        ({"tensorflow": "2.18.1"}, "keras is not installed"),
    ],
)
def test_other_versions(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], complaint: str
) -> None:
    """Everything else is an error that says what to install."""
    pretend(monkeypatch, **installed)
    with pytest.raises(VersionError, match=complaint) as raised:
        versions.check()
    assert "pip install" in str(raised.value)
