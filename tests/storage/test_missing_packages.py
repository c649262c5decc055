"""A store whose package is missing says which package to install."""

from __future__ import annotations

import sys

import pytest

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage import files


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("s3://b/r", "s3fs"),
        ("gs://b/r", "gcsfs"),
        ("az://b/r", "adlfs"),
        ("sftp://h/r", "paramiko"),
    ],
)
def test_hint(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint also works for an installation from a clone, which pip cannot find by name."""
    module = "sftp" if package == "paramiko" else "object_store"
    monkeypatch.setitem(sys.modules, f"keras_distplug.storage.stores.{module}", None)
    with pytest.raises(ConfigurationError, match=rf"Run `pip install {package}`\.$"):
        files.open_files(url)
