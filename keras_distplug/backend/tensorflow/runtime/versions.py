"""Are the installed packages the ones this release was tested with?"""

from __future__ import annotations

import platform
from importlib import metadata

from keras_distplug import __version__
from keras_distplug.core.errors import VersionError

TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu")

# Lowest inclusive, highest exclusive; pyproject.toml says the same and a test compares them.
TESTED = {"tensorflow": ((2, 18, 1), (2, 22)), "keras": ((3, 10, 0), (3, 16))}


def check() -> None:
    """Raises `VersionError` unless TensorFlow and Keras are installed in a tested version."""
    _check_one("tensorflow", *_installed_tensorflow())
    _check_one("keras", "keras", _installed("keras"))


def installed() -> dict[str, str]:
    """What must be the same on all workers."""
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


def _check_one(name: str, distribution: str, version: str | None) -> None:
    low, high = TESTED[name]
    wanted = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
    if version is None:
        raise VersionError(
            f"{name} is not installed. Install it with keras-distplug: "
            '`pip install "keras-distplug[tensorflow]"`, or '
            '`pip install "keras-distplug[tensorflow-cpu]"` for the smaller CPU build.'
        )
    if not low <= _release(version) < high:
        raise VersionError(
            f"{distribution} {version} is installed, but keras-distplug was tested with "
            f"{name}{wanted} only. Install a tested version: "
            f'`pip install "{distribution}{wanted}"`.'
        )


def _installed_tensorflow() -> tuple[str, str | None]:
    """The name and version of the distribution that TensorFlow was installed from."""
    for name in TENSORFLOW_DISTRIBUTIONS:
        if (installed := _installed(name)) is not None:
            return name, installed
    # Vendors' builds (tensorflow-macos, tf-nightly, ...) carry other distribution names.
    try:
        from tensorflow import version
    except ImportError:
        return "tensorflow", None
    return "tensorflow", str(version.VERSION)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)
