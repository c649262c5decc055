"""What a person sees of reading and writing checkpoints that takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from keras_distplug.core.log import announce, is_heard
from keras_distplug.storage.meter import Meter

AFTER_SECS = 1.0
_EVERY_SECS = 0.1


@contextmanager
def shown(what: str, meter: Meter, *, is_shown: bool) -> Iterator[None]:
    """Shows how far its body is, where that takes longer than a moment.

    On a terminal a bar moves on standard error, and is gone at the end. Elsewhere it is one line of
    the log. Who does not hear the package's log sees neither.

    Args:
        what: Such as `"writing checkpoint of step 42"`; short.
        meter: Counts what its body, or a thread that it waits for, does.
        is_shown: False on workers other than the chief.
    """
    if not is_shown or not is_heard():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_show, args=(what, meter, over), name="keras_distplug-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _show(what: str, meter: Meter, over: threading.Event) -> None:
    begun_s = time.monotonic()
    if over.wait(AFTER_SECS):
        return
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    # FORCE_COLOR makes rich take a file for a terminal; nothing can move there.
    if console.is_interactive and sys.stderr.isatty():
        _move(console, what, meter, over)
    else:
        announce(f"{what}: {meter} after {time.monotonic() - begun_s:.0f} s")


def _move(console: Console, what: str, meter: Meter, over: threading.Event) -> None:
    with Progress(
        TextColumn("keras_distplug: {task.description}", markup=False),
        BarColumn(bar_width=10),  # all of it in a line of 80 characters
        TextColumn("{task.fields[told]}", markup=False),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(what, total=None, told=str(meter))
        while not over.wait(_EVERY_SECS):
            bar.update(task, completed=meter.done, total=meter.total or None, told=str(meter))
