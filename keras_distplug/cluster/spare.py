"""A process that waits, with everything loaded, until a supervisor has a part for it.

It runs the user's script up to `import keras_distplug`, which returns when the part has come.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

from keras_distplug.core.supervised import JOINED_BY, SPARE


@dataclass(frozen=True)
class Part:
    """What makes a spare a worker.

    Args:
        changed: Environment variables that it gets.
        removed: Those that it loses.
    """

    changed: Mapping[str, str]
    removed: tuple[str, ...]

    @classmethod
    def between(cls, spare: Mapping[str, str], worker: Mapping[str, str]) -> Part:
        """From the environment that a spare was started with to that of a worker. What the script
        has changed itself stays."""
        changed = {name: value for name, value in worker.items() if spare.get(name) != value}
        return cls(changed, tuple(name for name in spare if name not in worker))

    @classmethod
    def from_line(cls, line: bytes) -> Part:
        said = json.loads(line)
        return cls(said["changed"], tuple(said["removed"]))

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    def play(self, environ: MutableMapping[str, str]) -> None:
        for name in self.removed:
            environ.pop(name, None)
        environ.update(self.changed)


def is_here() -> bool:
    """Whether this process is a spare; its subprocesses are not."""
    if not os.environ.get(SPARE) or multiprocessing.parent_process() is not None:
        return False
    return os.environ.setdefault(JOINED_BY, str(os.getpid())) == str(os.getpid())


def wait_for_part() -> None:
    """Returns when this spare has become a worker."""
    with open(os.environ[SPARE], "rb") as file:
        Part.from_line(file.readline()).play(os.environ)
