"""Google Compute Engine: preemption of spot machines, and maintenance of the host."""

from __future__ import annotations

from keras_distplug.preemption.notices.metadata import ADDRESS, TIMEOUT_S, request
from keras_distplug.preemption.notices.notice import Notice

_FLAVOR = {"Metadata-Flavor": "Google"}


class GceNotices:
    """Asks the metadata server of Compute Engine.

    It never says when. A preempted machine has about 30 seconds. Migration to another host
    is announced a minute ahead, and only to who asks; the end of a machine with GPUs, which does
    not migrate, an hour. Not verified on a real machine of Google's.

    Args:
        base_url: Of the metadata server. Defaults to its address on every machine.
        timeout_s: For each of the two requests of a poll.
    """

    def __init__(self, base_url: str = ADDRESS, timeout_s: float = TIMEOUT_S) -> None:
        self._base_url = base_url
        self._timeout_s = timeout_s

    def poll(self) -> Notice | None:
        """What is announced now, if anything. Raises MetadataError."""
        if self._one_of("preempted", "TRUE", "FALSE") == "TRUE":
            return Notice("GCE", "preempted", None, True)
        leaves, stays = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"
        event = self._one_of("maintenance-event", "NONE", stays, leaves)
        if event == "NONE":
            return None
        return Notice("GCE", f"maintenance-event {event}", None, event == leaves)

    def _one_of(self, key: str, *values: str) -> str:
        url = f"{self._base_url}/computeMetadata/v1/instance/{key}"
        reply = request(url, _FLAVOR, self._timeout_s)
        if reply.headers.get("Metadata-Flavor") != "Google":
            raise reply.is_not("Google's server, which says `Metadata-Flavor: Google`")
        value = reply.text.strip()
        if reply.status != 200 or value not in values:
            raise reply.is_not(f"one of {', '.join(values)}")
        return value
