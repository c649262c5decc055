"""Every replaced method of Keras or TensorFlow declares the versions it is for."""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress

import pytest

from keras_distplug.backend import tensorflow
from keras_distplug.backend.tensorflow.runtime.patching import Upstream
from keras_distplug.backend.tensorflow.runtime.versions import TESTED
from keras_distplug.core.errors import VersionError


class Upstreams:
    def method(self) -> str:
        return "stock"


UPSTREAM = Upstream("3.10 to 3.15", issue="keras-team/keras#20585")


def test_object() -> None:
    changed, other = Upstreams(), Upstreams()
    UPSTREAM.patch(changed, "method", lambda: "ours")
    assert [changed.method(), other.method()] == ["ours", "stock"]


def test_temporary_patch() -> None:
    """The original is restored, also if an object inherits it from its class and if the block
    raises an error."""
    one = Upstreams()
    for target in (Upstreams, one):
        with suppress(KeyError), UPSTREAM.patched(target, "method", lambda *_: "ours"):
            assert one.method() == "ours"
            raise KeyError
        assert one.method() == "stock"
    assert not vars(one)


@pytest.mark.parametrize("target", [Upstreams, Upstreams(), importlib])
def test_upstream_has_changed(target: object) -> None:
    """A method to be replaced must exist."""
    with pytest.raises(VersionError) as caught:
        UPSTREAM.patch(target, "renamed", lambda: "ours")
    assert "to have `renamed`, as in Keras 3.10 to 3.15 (keras-team/keras#20585)" in str(
        caught.value
    )
    assert not hasattr(target, "renamed")


@pytest.mark.tf
def test_tested_versions() -> None:
    """A release that supports newer versions must have checked every replaced method."""
    (low, _), (tensorflow_low, tensorflow_high) = TESTED["keras"], TESTED["tensorflow"]
    keras_high = TESTED["keras"][1]
    ranges = {
        "keras": f"{low[0]}.{low[1]} to {keras_high[0]}.{keras_high[1] - 1}",
        "tensorflow": f"{tensorflow_low[0]}.{tensorflow_low[1]} to {tensorflow_high[0]}."
        f"{tensorflow_high[1] - 1}",
    }
    found = 0
    for module in pkgutil.walk_packages(tensorflow.__path__, f"{tensorflow.__name__}."):
        upstream = vars(importlib.import_module(module.name)).get("_UPSTREAM")
        if upstream is None:
            continue
        found += 1
        assert upstream.keras in (None, ranges["keras"]), module.name
        assert upstream.tensorflow in (None, ranges["tensorflow"]), module.name
        assert upstream.keras or upstream.tensorflow, module.name
    assert found > 10
