"""Shows the progress of reading and writing checkpoints if that takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from keras_distplug.core.log import announce, is_log_enabled
from keras_distplug.storage.meter import Meter

AFTER_SECS = 1.0
_EVERY_SECS = 0.1


@contextmanager
def show_progress(what: str, meter: Meter, *, is_shown: bool) -> Iterator[None]:
    """Shows the progress of the body if it takes longer than a second.

    On a terminal, this is a progress bar on standard error, removed at the end. Elsewhere, it is
    one line of the log. If the package's log is disabled, nothing is shown.

    Args:
        what: The description; short, such as `"writing checkpoint of step 42"`.
        meter: Counts the work done by the body, or by a thread that it waits for.
        is_shown: False on workers other than the chief.
    """
    if not is_shown or not is_log_enabled():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_run, args=(what, meter, over), name="keras_distplug-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _run(what: str, meter: Meter, over: threading.Event) -> None:
    started_s = time.monotonic()
    if over.wait(AFTER_SECS):
        return
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    # With FORCE_COLOR, rich treats a file as a terminal; a bar cannot move there.
    if console.is_interactive and sys.stderr.isatty():
        _animate(console, what, meter, over)
    else:
        announce(f"{what}: {meter} after {time.monotonic() - started_s:.0f} s")


def _animate(console: Console, what: str, meter: Meter, over: threading.Event) -> None:
    with Progress(
        TextColumn("keras_distplug: {task.description}", markup=False),
        BarColumn(bar_width=10),  # makes everything fit into 80 characters
        TextColumn("{task.fields[progress]}", markup=False),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(what, total=None, progress=str(meter))
        while not over.wait(_EVERY_SECS):
            bar.update(task, completed=meter.done, total=meter.total or None, progress=str(meter))
