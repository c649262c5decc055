"""The garbage collector is paused, and left as it was."""

from __future__ import annotations

import gc

import pytest

from keras_distplug.core.collector import collector_paused


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collector_is_left_as_it_was(is_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()
