"""Checks the installed TensorFlow and Keras against the versions this release was tested with."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from keras_distplug import __version__
from keras_distplug.backend.tensorflow.runtime import keras_backend
from keras_distplug.core.errors import VersionError

STRICT = "KERAS_DISTPLUG_STRICT_VERSIONS"  # "1" refuses versions newer than the tested ones

# All of these install the same module; the first one is the default in messages.
DISTRIBUTIONS = {
    "tensorflow": (
        *("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-intel"),
        *("tensorflow-macos", "tensorflow-cpu-aws", "tensorflow-rocm", "intel-tensorflow"),
        *("tf-nightly", "tf-nightly-cpu", "tf-nightly-intel", "tf-nightly-macos"),
    ),
    "keras": ("keras", "keras-nightly"),
}

# The lowest supported version, and the first one that is newer than the tested ones. pyproject.toml
# has the same lower bounds and, because newer versions only cause a warning, no upper bounds.
TESTED = {"tensorflow": ((2, 18, 1), (2, 22)), "keras": ((3, 10, 0), (3, 16))}

_PRIVATE = ("keras.src", "tensorflow.python", "tensorflow.core")
_TRACKER = "the issue tracker of the repository that keras_distplug was installed from"


@dataclass(frozen=True)
class Installation:
    """An installed package.

    Args:
        distribution: The name of the package as known to pip.
        version: The installed version.
    """

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def check() -> None:
    """Checks Keras' backend, and the versions of Keras and TensorFlow.

    A version newer than the tested ones causes a warning, unless `KERAS_DISTPLUG_STRICT_VERSIONS`
    is 1.

    Raises:
        ConfigurationError: If Keras uses another backend than TensorFlow.
        VersionError: If a package is missing or too old.
    """
    keras_backend.require_tensorflow()
    for name in TESTED:
        _check_one(name, find(name))


def installed() -> dict[str, str]:
    """Returns the versions that must be the same on all workers."""
    import keras
    import numpy
    import tensorflow

    return {
        "keras_distplug": __version__,
        "Keras": str(keras.__version__),
        "TensorFlow": str(tensorflow.__version__),
        "Python": platform.python_version(),
        "NumPy": numpy.__version__,
    }


def describe() -> str:
    """Returns the versions of Keras, TensorFlow and this package, for messages."""
    found = [find(name) or f"no {name}" for name in ("keras", "tensorflow")]
    return f"{found[0]}, {found[1]} and keras_distplug {__version__}"


def missing_name(what: str, tested: str = "") -> VersionError:
    """Returns the error for a private name of Keras or TensorFlow that does not exist.

    Args:
        what: The name, and where it was expected.
        tested: The versions that have it. Defaults to all tested ones.
    """
    tested = tested or " and ".join(f"{name}{_tested(name)}" for name in TESTED)
    return VersionError(
        f"Expected {what}, as in {tested}. Received: {describe()}, where this does not hold. "
        f"Install one of the expected versions, and please report this message in {_TRACKER}."
    )


def explain(error: ImportError) -> VersionError | None:
    """Returns the error to raise for a failed import; None unless it was of a private module."""
    if not (error.name or "").startswith(_PRIVATE):
        return None
    return missing_name(f"an import of {error.name} to succeed ({error})")


def find(name: str) -> Installation | None:
    """Finds the distribution that TensorFlow or Keras was installed from."""
    found = [
        Installation(distribution, version)
        for distribution in DISTRIBUTIONS[name]
        if (version := _installed(distribution)) is not None
    ]
    loaded = _loaded(name)
    # Two distributions overwrite each other's files; the module has the version of the last one.
    for each in found:
        if loaded is None or _release(each.version) == _release(loaded):
            return each
    if loaded is None and name == "tensorflow":
        loaded = _tensorflow_of_unknown_name()
    if loaded is None:
        return None
    return Installation(found[0].distribution if found else name, loaded)


def _check_one(name: str, found: Installation | None) -> None:
    if found is None:
        smaller = ", or `pip install tensorflow-cpu` for the smaller CPU build"
        raise VersionError(
            f"{name} is not installed. Install it with `pip install {name}`"
            f"{smaller if name == 'tensorflow' else ''}."
        )
    low, above = TESTED[name]
    if _release(found.version) < low:
        raise VersionError(
            f"{found} is installed, but keras-distplug needs {name}>={_dotted(low)}. Install a "
            f'tested version: `pip install "{found.distribution}{_tested(name)}"`.'
        )
    if _release(found.version) < above:
        return
    if os.environ.get(STRICT) == "1":
        raise VersionError(
            f"{found} is installed, but keras-distplug {__version__} was tested with "
            f"{name}{_tested(name)} only, and {STRICT} is 1. Install a tested version: "
            f'`pip install "{found.distribution}{_tested(name)}"`.'
        )
    _warn_once(name, found)


@cache
def _warn_once(name: str, found: Installation) -> None:
    """Warns in the first call per process and version."""
    warnings.warn(
        f"{found} is newer than the versions that keras-distplug {__version__} was tested with, "
        f"{name}{_tested(name)}: training, resuming and exporting with it are untested. "
        f"Set {STRICT}=1 to refuse untested versions.",
        stacklevel=4,
    )


def _loaded(name: str) -> str | None:
    """Returns the version of a module if it is already imported."""
    version = getattr(sys.modules.get(name), "__version__", None)
    return None if version is None else str(version)


def _tensorflow_of_unknown_name() -> str | None:
    """Returns the version of a vendor's build, whose distribution name is unknown."""
    try:
        from tensorflow import version
    except ImportError:
        return None
    return str(version.VERSION)


@cache
def _installed(name: str) -> str | None:
    """Returns the version of a distribution; searching for it takes milliseconds."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _tested(name: str) -> str:
    low, above = TESTED[name]
    return f">={_dotted(low)},<{_dotted(above)}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _release(version: str) -> tuple[int, ...]:
    """Returns the first three numbers: (2, 22, 0) for 2.22.0rc0, 2.22.0-rc0 and 2.22.0.dev1."""
    numbers = []
    for part in version.replace("-", ".").split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)
