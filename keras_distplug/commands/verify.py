"""`keras-distplug verify`: compares checkpoints with their manifests."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from keras_distplug.commands import locations, progress_bar, tables
from keras_distplug.commands.locations import Location
from keras_distplug.commands.progress_bar import Bar
from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from keras_distplug.storage import architecture, runs, survey
from keras_distplug.storage.files import Files
from keras_distplug.storage.survey import Depth, SurveyedCheckpoint

_NO_DAMAGE = ("cut off", "unfinished")


@dataclass(frozen=True)
class Finding:
    """The state of a checkpoint or of another file of a run.

    Args:
        run: The name of the run.
        name: The name of the checkpoint or file.
        state: A state of `SurveyedCheckpoint`, except that a committed checkpoint is `"whole"` if
            every byte was read and `"sizes match"` otherwise.
        bytes: The number of bytes that were checked; 0 for files without arrays.
        reason: The reason for a bad state. Defaults to `None`.
    """

    run: str
    name: str
    state: str
    bytes: int = 0
    reason: str | None = None


def run(parsed: argparse.Namespace) -> int:
    location = locations.of(parsed)
    files = location.files
    depth = Depth.BYTES if parsed.deep else Depth.SIZES
    found = []
    with progress_bar.bar() as bar:
        for each in _findings(location, depth, bar):
            found.append(each)
            # Printed as it is found: reading every byte takes time.
            if not parsed.json:
                with bar.hidden():
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
        what = "intact" if parsed.deep else "of the right size (--deep also reads their bytes)"
        counted = tables.plural(len(whole), "checkpoint")
        tables.say(f"{counted} {what}; damaged or unreadable: {len(damaged)}")
    if not whole and not damaged:
        asked = location.checkpoint
        what = "no complete checkpoint" + ("" if asked is None else f" {asked!r}")
        raise NoCheckpointError(f"{files.where(location.run or '')} holds {what} to verify.")
    return 1 if damaged else 0


def _findings(location: Location, depth: Depth, bar: Bar) -> Iterator[Finding]:
    step = location.checkpoint
    for name in location.run_names():
        files = location.files
        if step is None:
            yield from _find_damage(name, "RUN.json", partial(runs.read_run, files, name))
            yield from _find_damage(
                name, "MODEL.json", partial(architecture.require_whole, files, name)
            )
        if bar.is_shown:
            total = _sum_bytes(files, name, step) if depth is Depth.BYTES else None
            bar.start(f"verifying {name}", total, "bytes" if total else "")
            files = bar.counting(files)
        for seen in survey.list_checkpoints(files, name, depth, step):
            sound = "whole" if depth is Depth.BYTES else "sizes match"
            state = sound if seen.state == "committed" else seen.state
            yield Finding(name, seen.name, state, seen.bytes, _reason(seen))


def _sum_bytes(files: Files, run: str, step: int | str | None) -> int:
    """Returns the size of the checkpoints whose bytes will be read."""
    found = survey.list_checkpoints(files, run, Depth.MANIFESTS, step)
    return sum(each.bytes for each in found if each.state == "committed")


def _find_damage(run: str, name: str, read: Callable[[], object]) -> Iterator[Finding]:
    """Yields a finding if a file in a run's folder is damaged or cannot be read."""
    try:
        read()
    except CorruptCheckpointError as error:
        yield Finding(run, name, "damaged", reason=str(error))
    except CheckpointError as error:
        yield Finding(run, name, "unreadable", reason=str(error))


def _reason(seen: SurveyedCheckpoint) -> str | None:
    return f"quarantined: {seen.reason}" if seen.is_set_aside else seen.reason


def _line(found: Finding) -> str:
    details = found.reason or tables.size(found.bytes)
    state = "intact" if found.state == "whole" else found.state
    return f"{found.run}/{found.name}: {state}, {details}"
