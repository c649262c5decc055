"""Google Compute Engine: preemption of spot machines, and maintenance of the host."""

from __future__ import annotations

from keras_distplug.preemption.notices.metadata import ADDRESS, TIMEOUT_S, request
from keras_distplug.preemption.notices.notice import Notice

_FLAVOR = {"Metadata-Flavor": "Google"}


class GceNotices:
    """Polls the metadata server of Compute Engine.

    Its notices contain no time. A preempted machine has about 30 seconds left. Migration to another
    host is announced a minute ahead, and only to machines that poll for it; the termination of a
    machine with GPUs, which cannot migrate, an hour ahead. Not verified on a real Google machine.

    Args:
        base_url: URL of the metadata server. Defaults to its address on every machine.
        timeout_s: Timeout of each of a poll's two requests, in seconds. Defaults to 2.
    """

    def __init__(self, base_url: str = ADDRESS, timeout_s: float = TIMEOUT_S) -> None:
        self._base_url = base_url
        self._timeout_s = timeout_s

    def poll(self) -> Notice | None:
        """Returns the current notice, or None. Raises MetadataError."""
        if self._get_one_of("preempted", "TRUE", "FALSE") == "TRUE":
            return Notice("GCE", "preemption", None, True)
        terminate, migrate = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"
        event = self._get_one_of("maintenance-event", "NONE", migrate, terminate)
        if event == "NONE":
            return None
        return Notice("GCE", f"maintenance-event {event}", None, event == terminate)

    def _get_one_of(self, key: str, *values: str) -> str:
        url = f"{self._base_url}/computeMetadata/v1/instance/{key}"
        reply = request(url, _FLAVOR, self._timeout_s)
        if reply.headers.get("Metadata-Flavor") != "Google":
            raise reply.is_not("Google's server, which sends `Metadata-Flavor: Google`")
        value = reply.text.strip()
        if reply.status != 200 or value not in values:
            raise reply.is_not(f"one of {', '.join(values)}")
        return value
