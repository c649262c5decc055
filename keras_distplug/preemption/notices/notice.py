"""A cloud's notice about this machine."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """A cloud's announcement about this machine.

    Args:
        source: Name of the cloud: `"AWS"`, `"GCE"` or `"Azure"`.
        announced: The announcement in the cloud's terms, such as
            `"spot instance-action terminate"`.
        at_unix_s: Time at which the machine goes away, in seconds since 1970; None if the cloud
            gives no time, or it has already started.
        is_final: True if this process will not survive. False for a recommendation, and for an
            event that only pauses the machine.
    """

    source: str
    announced: str
    at_unix_s: float | None
    is_final: bool


# Sends one request. Returns the current notice, or None; raises MetadataError if it is unknown.
Poll = Callable[[], Notice | None]


def unix_s(text: object, parse: Callable[[str], datetime.datetime]) -> float | None:
    """Parses a time. Returns None if it is unreadable: the notice counts without a time, too."""
    if not isinstance(text, str):
        return None
    try:
        moment = parse(text)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()
