"""The package's log: short lines for people."""

from __future__ import annotations

import functools
import logging
import sys

from keras_distplug.core.printable import printable


def announce(message: str) -> None:
    """Logs `message` to standard output, or to where the user has sent logger `keras_distplug`."""
    _logger().info(printable(message))


@functools.cache
def advise(message: str) -> None:
    """Logs `message` once, to logger `keras_distplug.advice`, which can be silenced on its own."""
    _logger().getChild("advice").info(printable(message))


def is_heard() -> bool:
    """Returns True if announcements are logged."""
    return _logger().isEnabledFor(logging.INFO)


def _logger() -> logging.Logger:
    logger = logging.getLogger("keras_distplug")
    if not logger.handlers and logger.level == logging.NOTSET:
        # The handler that TensorFlow's absl adds to the root logger shows warnings only.
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
