"""`keras-distplug watch`: the first screen of a run in a terminal."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from rich.console import ConsoleRenderable
from rich.live import Live

from keras_distplug.commands import first_screen, locations, tables
from keras_distplug.core.errors import CheckpointError, ConfigurationError, NoCheckpointError
from keras_distplug.runlog import log_files
from keras_distplug.runlog.run_place import delay_secs, find_place
from keras_distplug.runlog.run_state import State
from keras_distplug.runlog.summary import Judged, judged, make_headline
from keras_distplug.storage import survey
from keras_distplug.storage.files import Files
from keras_distplug.storage.survey import CheckpointState

CODES: Mapping[State, int] = {
    State.FINISHED: 0,
    State.UNKNOWN: 3,
    State.STARTING: 10,
    State.TRAINING: 10,
    State.SLOW: 11,
    State.SILENT: 12,
    State.STALLED: 12,
    State.RESTARTING: 13,
    State.DEAD: 14,
    State.FAILED: 14,
    State.STOPPED: 15,
}
TROUBLE = frozenset(State) - {State.UNKNOWN, State.STARTING, State.TRAINING, State.FINISHED}
_LOOK_SECS = 30.0  # between looks at the checkpoints
_LEAST_STORE_SECS = 5.0  # between requests to a remote store


def run(parsed: argparse.Namespace) -> int:
    if parsed.interval < 0.1:
        raise ConfigurationError(
            f"Expected --interval to be at least 0.1 s. Received: {parsed.interval:g}"
        )
    location = locations.of(parsed, needs_run=False)
    files = location.files
    pause_s = parsed.interval
    if not files.traits.is_near:
        pause_s = max(pause_s, _LEAST_STORE_SECS)
    ends_s = math.inf if parsed.timeout is None else time.monotonic() + parsed.timeout
    watched = _Watched(files, location.run, waits=parsed.timeout is not None)
    seen: _Seen | None = None
    try:
        with _screen(is_silent=parsed.json) as draw:
            while True:
                seen = _look(watched, seen)
                draw(seen)
                left_s = ends_s - time.monotonic()
                if parsed.once or left_s <= 0 or _is_over(seen, parsed.until):
                    break
                time.sleep(min(pause_s, left_s))
    except KeyboardInterrupt:
        if seen is None:
            return CODES[State.UNKNOWN]
    if parsed.json:
        tables.say_json(_document(seen))
    return 0 if _has_come(seen, parsed.until) else CODES[seen.state]


@dataclass(frozen=True)
class _Seen:
    """A run at a point in time.

    Args:
        at: In seconds since 1970.
        where: The directory.
        name: The name of the run's folder.
        judged: Its judged state; None until the log exists.
        problem: Why it could not be read since; "" if it could.
    """

    at: float
    where: str
    name: str = ""
    judged: Judged | None = None
    problem: str = ""

    @property
    def state(self) -> State:
        return State.UNKNOWN if self.judged is None else self.judged.verdict.state


def _look(watched: _Watched, before: _Seen | None) -> _Seen:
    """Reads the run. Storage that fails for a while does not end the command."""
    now = time.time()
    try:
        return watched.look(now)
    except NoCheckpointError:
        raise
    except (CheckpointError, OSError) as error:
        if before is None:
            raise CheckpointError(f"The run cannot be read: {error}") from error
        return replace(before, at=now, problem=f"The run cannot be read ({error}); retrying")


def _has_come(seen: _Seen, condition: str | None) -> bool:
    """True if the state is the one that the user waits for."""
    match condition:
        case None:
            return False
        case "ended":
            return seen.judged is not None and seen.judged.verdict.has_ended
        case "trouble":
            return seen.state in TROUBLE
    return str(seen.state) == condition


def _is_over(seen: _Seen, condition: str | None) -> bool:
    """True if there is nothing left to wait for."""
    has_ended = seen.judged is not None and seen.judged.verdict.has_ended
    return has_ended or _has_come(seen, condition)


class _Watched:
    """Reads the newest run of a directory again and again."""

    def __init__(self, files: Files, only: str | None, *, waits: bool) -> None:
        self._files = files
        self._only = only
        self._waits = waits  # for the first log
        self._readers: dict[str, log_files.Reader] = {}
        self._checkpoints: Mapping[int, CheckpointState] | None = None
        self._looked: tuple[str, float] = ("", -math.inf)

    def look(self, now: float) -> _Seen:
        where = self._files.where()
        try:
            name = log_files.runs(self._files, self._only)[-1]
        except NoCheckpointError:
            if not self._waits:
                raise
            return _Seen(now, where)
        reader = self._readers.setdefault(
            name, log_files.Reader(self._files, name, lambda note: None)
        )
        fits, supervised = reader.read()
        if self._looked[0] != name or now - self._looked[1] >= _LOOK_SECS:
            self._checkpoints = survey.checkpoint_states(self._files, name)
            self._looked = name, now
        place, delay = find_place(self._files, name), delay_secs(self._files)
        known = judged(fits, supervised, now, self._checkpoints, place, delay)
        return _Seen(now, where, name, known)


@contextmanager
def _screen(*, is_silent: bool) -> Iterator[Callable[[_Seen], None]]:
    """Draws in a terminal; elsewhere, such as in a file, prints every change of the state."""
    console = tables.console()
    if is_silent:
        yield lambda seen: None
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda seen: live.update(_drawn(seen), refresh=True)
    else:
        last: list[State] = []

        def draw(seen: _Seen) -> None:
            if last[-1:] != [seen.state]:
                last.append(seen.state)
                console.print(_drawn(seen))

        yield draw


def _drawn(seen: _Seen) -> ConsoleRenderable:
    if seen.judged is None:
        return first_screen.nothing(seen.where)
    return first_screen.screen(seen.where, seen.name, seen.judged, seen.at, seen.problem)


def _document(seen: _Seen) -> dict[str, object]:
    if seen.judged is None:
        return {"directory": seen.where, "state": str(seen.state)}
    incidents = [asdict(group) for group in seen.judged.verdict.groups]
    shown = make_headline(seen.name, seen.judged)
    return {"directory": seen.where, **shown, "incidents": incidents}
