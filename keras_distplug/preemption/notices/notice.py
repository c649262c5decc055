"""One announcement of a cloud."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """What a cloud announced about this machine.

    Args:
        source: Who said it: `"AWS"`, `"GCE"` or `"Azure"`.
        announced: What, in the cloud's own words, such as `"spot instance-action terminate"`.
        at_unix_s: When the machine goes away, in seconds since 1970. None if the cloud does not
            say, or if it is under way.
        is_final: Whether this process will not survive it. False for a mere recommendation, and
            for what only pauses the machine.
    """

    source: str
    announced: str
    at_unix_s: float | None
    is_final: bool


# Asks once: what is announced now, or None. Raises MetadataError if that cannot be known.
Poll = Callable[[], Notice | None]


def unix_s(text: object, parse: Callable[[str], datetime.datetime]) -> float | None:
    """The time that `text` names, or None: a notice counts, even if its time cannot be read."""
    if not isinstance(text, str):
        return None
    try:
        moment = parse(text)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()
