"""Azure: scheduled events of a virtual machine, including eviction of spot machines."""

from __future__ import annotations

import email.utils
import math
from typing import Any

from keras_distplug.core.errors import MetadataError
from keras_distplug.preemption.notices.metadata import ADDRESS, Reply, request
from keras_distplug.preemption.notices.notice import Notice, unix_s

# The only other event, Freeze, pauses the machine for some seconds and loses nothing.
_FINAL = frozenset(("Preempt", "Reboot", "Redeploy", "Terminate"))
_TIMEOUT_S = 10.0
# The very first request enables the service and may take two minutes.
_FIRST_TIMEOUT_S = 130.0


class AzureNotices:
    """Polls Azure's metadata service for scheduled events.

    Eviction is announced at least 30 seconds ahead, other events 5 to 15 minutes. Azure also lists
    events of other machines in the same set, so only events that name this machine count; if its
    name cannot be read, all count. Not verified on a real Azure machine.

    Until the first answer, a request may take 130 seconds: Azure promises an answer within two
    minutes, and aborting the request might restart that time.

    Args:
        base_url: URL of the metadata server. Defaults to its address on every machine.
        timeout_s: Timeout of a request in seconds. Defaults to 10.
        first_timeout_s: Timeout of requests until the first answer, in seconds. Defaults to 130.
    """

    def __init__(
        self,
        base_url: str = ADDRESS,
        timeout_s: float = _TIMEOUT_S,
        first_timeout_s: float = _FIRST_TIMEOUT_S,
    ) -> None:
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._events_timeout_s = first_timeout_s
        self._name: str | None = None

    def poll(self) -> Notice | None:
        """Returns the most urgent notice, or None. Raises MetadataError."""
        reply = self._get("scheduledevents?api-version=2020-07-01", self._events_timeout_s)
        events = reply.fields().get("Events")
        if not isinstance(events, list):
            raise reply.is_not('a list of "Events"')
        self._events_timeout_s = self._timeout_s
        notices = [each for event in events if (each := self._notice(event, reply))]
        return min(notices, key=_by_urgency, default=None)

    def _notice(self, event: Any, reply: Reply) -> Notice | None:
        match event:
            case {"EventType": str(kind), "Resources": [*names]}:
                announced = f"scheduled event {kind}"
            case _:
                raise reply.is_not('events with "EventType" and "Resources"')
        own = self._own_name()
        if own is None:
            announced += f" of {', '.join(map(str, names))} (this machine's own name is unknown)"
        elif own.lower() not in (str(name).lower() for name in names):
            return None
        at_unix_s = unix_s(event.get("NotBefore"), email.utils.parsedate_to_datetime)
        return Notice("Azure", announced, at_unix_s, kind in _FINAL)

    def _own_name(self) -> str | None:
        if self._name is None:
            where = "instance/compute/name?api-version=2021-02-01&format=text"
            try:
                reply = self._get(where, self._timeout_s)
            except MetadataError:
                return None  # the notice will say so
            if reply.status == 200:
                self._name = reply.text.strip() or None
        return self._name

    def _get(self, path: str, timeout_s: float) -> Reply:
        return request(f"{self._base_url}/metadata/{path}", {"Metadata": "true"}, timeout_s)


def _by_urgency(notice: Notice) -> tuple[bool, float]:
    # An event without a time has started.
    return not notice.is_final, -math.inf if notice.at_unix_s is None else notice.at_unix_s
