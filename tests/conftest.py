from __future__ import annotations

from functools import cache

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("tf"):
        _split_cpu()


@cache
def _split_cpu() -> None:
    """Two logical devices, for tests of several replicas; possible before the first tensor only."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
