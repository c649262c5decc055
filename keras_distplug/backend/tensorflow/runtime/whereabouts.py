"""Finds out what training and the threads of this process are doing.

Keras 3.10 to 3.15 and TensorFlow 2.18 to 2.21 have no API that reports the state of a step, but
the frames of the training thread show it: they are in `iterator_get_next` while it waits for input,
in a user's callback, or in a step.
"""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from keras_distplug.backend.tensorflow.runtime.frames import NOT_THE_USERS, callers

# Files that call Python code for input, in threads of TensorFlow and Keras.
_MAKERS = ("tensorflow/python/ops/script_ops.py", "trainers/data_adapters/py_dataset_adapter.py")
_FETCHES = "tensorflow/python/ops/gen_dataset_ops.py"
_AGREES = str(Path(__file__).with_name("context.py"))


@dataclass(frozen=True)
class Whereabouts:
    """The current activity of the training thread.

    Args:
        line: The line of user code that it runs within `fit`, such as `"train.py:31 in load"`;
            None if it runs none.
        input_line: The line of user code in a thread that produces input, or None.
        awaits: `"input"` if it waits for input, `"others"` if it waits for other workers outside a
            step; None if neither is visible. Steps that fetch their own input, as Keras' do before
            3.16, hide that they wait for it.
    """

    line: str | None
    input_line: str | None
    awaits: Literal["input", "others"] | None


def whereabouts(thread: int | None) -> Whereabouts:
    """Returns the activity of the thread with that `ident`."""
    everywhere = sys._current_frames()
    trains = list(callers(everywhere.pop(thread or 0, None)))
    lines = (_get_line(list(callers(frame))) for frame in everywhere.values() if _is_making(frame))
    return Whereabouts(
        line=_get_line(_within_fit(trains)),
        input_line=next((line for line in lines if line), None),
        awaits=_awaited(trains),
    )


def is_debugged(thread: int) -> bool:
    """True if the thread with that `ident` is stopped in a debugger."""
    return any(
        Path(frame.f_code.co_filename).name in ("pdb.py", "bdb.py")
        or "pydevd" in frame.f_code.co_filename
        for frame in callers(sys._current_frames().get(thread))
    )


def may_be_debugged() -> bool:
    """True if an IDE's debugger is loaded, which stops all threads at a breakpoint."""
    return "pydevd" in sys.modules


def stacks() -> str:
    """Returns the stack traces of all other Python threads, with the most recent call last."""
    frames = sys._current_frames()
    parts = []
    for thread in threading.enumerate():
        frame = frames.pop(thread.ident or 0, None)
        if frame is not None and thread is not threading.current_thread():
            parts.append(_stack(f"Thread {thread.name!r}", frame))
    # Threads started by C code, such as TensorFlow's threads that call Python.
    own = threading.get_ident()
    parts += [_stack(f"Thread {ident}", frame) for ident, frame in frames.items() if ident != own]
    return "\n".join(parts)


def _stack(title: str, frame: FrameType) -> str:
    return f"{title}:\n{''.join(traceback.format_stack(frame))}"


def _awaited(frames: list[FrameType]) -> Literal["input", "others"] | None:
    for frame in frames:
        if frame.f_code.co_name.startswith("iterator_get_next") and _is_in(frame, _FETCHES):
            return "input"
        if frame.f_code.co_name in ("get", "barrier") and _is_in(frame, _AGREES):
            return "others"
    return None


def _within_fit(frames: list[FrameType]) -> list[FrameType]:
    within: list[FrameType] = []
    for frame in frames:
        if frame.f_code.co_name == "fit" and _is_in(frame, "backend/tensorflow/trainer.py"):
            return within
        within.append(frame)
    return []


def _is_making(frame: FrameType) -> bool:
    return any(_is_in(each, *_MAKERS) for each in callers(frame))


def _get_line(frames: list[FrameType]) -> str | None:
    """Returns the innermost line that belongs to user code."""
    for frame in frames:
        code = frame.f_code
        if not code.co_filename.startswith(("<", *NOT_THE_USERS)):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    return None


def _is_in(frame: FrameType, *files: str) -> bool:
    return frame.f_code.co_filename.endswith(files)
