"""Other Keras backends are refused with one error; distributions without effect are reported."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support.cluster import environment

import keras_distplug
from keras_distplug.backend.tensorflow.runtime import keras_backend
from keras_distplug.core.errors import ConfigurationError

FIRST_USES = """
import sys
import keras_distplug as kd

kd.Retention, kd.errors, kd.register_store
for name in ("defaults", "distributed_fit", "init", "BackupAndRestore"):
    try:
        getattr(kd, name)
    except kd.errors.ConfigurationError as error:
        assert repr(sys.argv[1]) in str(error), error
        assert "KERAS_BACKEND=tensorflow" in str(error), error
    else:
        raise AssertionError(f"{name} can be used")
assert "keras" not in sys.modules
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("place", ["variable", "file"])
def test_first_use(backend: str, place: str, tmp_path: Path) -> None:
    """The first use of a name that needs Keras is an error, before Keras loads the backend."""
    if place == "file":
        (tmp_path / "keras.json").write_text(f'{{"backend": "{backend}"}}')
        extra = {"KERAS_HOME": str(tmp_path)}
    else:
        extra = {"KERAS_BACKEND": backend}
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_USES, backend],
        env=environment(extra),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


def test_loaded_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend of an imported Keras takes precedence over the environment."""
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setattr(keras_backend, "_loaded", lambda: "jax")
    with pytest.raises(ConfigurationError, match="Received: 'jax'"):
        _ = keras_distplug.defaults
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(keras_backend, "_loaded", lambda: "tensorflow")
    keras_backend.require_tensorflow()


def test_configured(tmp_path: Path) -> None:
    """Without a variable or a readable file, the backend is TensorFlow, as in Keras."""
    assert keras_backend._configured({"KERAS_HOME": str(tmp_path)}) == "tensorflow"
    for text in ("[", "[]", "{}", '{"backend": "tensorflow"}'):
        (tmp_path / "keras.json").write_text(text)
        assert keras_backend._configured({"KERAS_HOME": str(tmp_path)}) == "tensorflow"


@pytest.mark.tf
def test_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Keras distribution, which has no effect, is reported; without one, there is no warning."""
    import keras

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="keras.distribution")
        keras_distplug.defaults(tmp_path)
    distribution = type("DataParallel", (), {})()  # Keras 3.10 cannot create one under TensorFlow
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        with pytest.warns(UserWarning, match=r"set_distribution\(DataParallel\) has no effect"):
            keras_distplug.defaults(tmp_path)
    finally:
        keras.distribution.set_distribution(before)
