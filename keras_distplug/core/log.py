"""The package's log: short lines for people."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TextIO

from keras_distplug.core.printable import printable


def announce(message: str) -> None:
    """Logs `message` to standard output, or to where the user has sent logger `keras_distplug`."""
    _logger().info(printable(message))


@functools.cache
def advise(message: str) -> None:
    """Logs `message` once, to logger `keras_distplug.advice`, which can be silenced on its own."""
    _logger().getChild("advice").info(printable(message))


_take_open_line: list[Callable[[], bool]] = []


def end_open_lines(take_open_line: Callable[[], bool]) -> None:
    """Ends an open line on standard output, such as a progress bar, before the next message.

    Args:
        take_open_line: Returns True if the last line has no end; from then on, it counts as ended.
    """
    _take_open_line[:] = [take_open_line]


class _Handler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        if any(take() for take in _take_open_line):
            self.stream.write("\n")
        super().emit(record)


def is_log_enabled() -> bool:
    """Returns True if announcements are logged."""
    return _logger().isEnabledFor(logging.INFO)


def _logger() -> logging.Logger:
    logger = logging.getLogger("keras_distplug")
    if not logger.handlers and logger.level == logging.NOTSET:
        # The handler that TensorFlow's absl adds to the root logger shows warnings only.
        handler = _Handler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
