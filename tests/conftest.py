from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import cache

import pytest

# TensorFlow chooses by the processor. Most users have it, and it is what has most to be mended.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("tf"):
        _split_cpu()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's own, which hears the package whether or not a test before made it talk."""
    logger = logging.getLogger("keras_distplug")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


@cache
def _split_cpu() -> None:
    """Two logical devices, for tests of several replicas; possible before the first tensor only."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
