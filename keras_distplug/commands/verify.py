"""`keras-distplug verify`: are the bytes those that were committed?"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from keras_distplug.commands import tables
from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from keras_distplug.storage import architecture, runs, survey
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.survey import Depth, Seen

_NO_DAMAGE = ("cut off", "unfinished")


@dataclass(frozen=True)
class Finding:
    """How one thing is.

    Args:
        run: Its run.
        name: Its name.
        state: As in `Seen`; instead of `"committed"`, `"whole"` where every byte was read, and
            otherwise `"sizes match"`.
        bytes: How many were looked at; 0 for what has no arrays.
        reason: What is wrong.
    """

    run: str
    name: str
    state: str
    bytes: int = 0
    reason: str | None = None


def run(parsed: argparse.Namespace) -> int:
    files = open_files(parsed.directory, parsed.storage_options)
    depth = Depth.BYTES if parsed.deep else Depth.SIZES
    found = []
    for each in _findings(files, parsed.run, parsed.step, depth):
        found.append(each)
        # At once: reading every byte takes its time.
        if not parsed.json:
            tables.say(_line(each))
    checkpoints = [each for each in found if each.name.partition("-")[0] in survey.KINDS]
    sound = "whole" if parsed.deep else "sizes match"
    damaged = [each for each in found if each.state not in (sound, *_NO_DAMAGE)]
    whole = [each for each in checkpoints if each.state == sound]
    if parsed.json:
        tables.say_json(
            {
                "directory": files.where(),
                "deep": parsed.deep,
                "whole": len(whole),
                "damaged": len(damaged),
                "findings": [asdict(each) for each in found],
            }
        )
    elif whole or damaged:
        what = "whole" if parsed.deep else "of the right size (--deep reads their bytes, too)"
        tables.say(f"{len(whole)} {what}, {len(damaged)} damaged or unreadable")
    if not whole and not damaged:
        what = "no checkpoint" if parsed.step is None else f"no checkpoint {parsed.step!r}"
        raise NoCheckpointError(f"{files.where()} holds {what} to verify.")
    return 1 if damaged else 0


def _findings(
    files: Files, only: str | None, step: int | str | None, depth: Depth
) -> Iterator[Finding]:
    for name in survey.run_names(files, only):
        if step is None:
            yield from _of_record(name, "RUN.json", partial(runs.read_run, files, name))
            yield from _of_record(
                name, "MODEL.json", partial(architecture.require_whole, files, name)
            )
        for seen in survey.checkpoints_of(files, name, depth, step):
            sound = "whole" if depth is Depth.BYTES else "sizes match"
            state = sound if seen.state == "committed" else seen.state
            yield Finding(name, seen.name, state, seen.bytes, _reason(seen))


def _of_record(run: str, name: str, read: Callable[[], object]) -> Iterator[Finding]:
    """Nothing, if a file that a run has beside its checkpoints is whole."""
    try:
        read()
    except CorruptCheckpointError as error:
        yield Finding(run, name, "damaged", reason=str(error))
    except CheckpointError as error:
        yield Finding(run, name, "unreadable", reason=str(error))


def _reason(seen: Seen) -> str | None:
    return f"set aside: {seen.reason}" if seen.is_set_aside else seen.reason


def _line(found: Finding) -> str:
    told = found.reason or tables.size(found.bytes)
    return f"{found.run}/{found.name}: {found.state}, {told}"
