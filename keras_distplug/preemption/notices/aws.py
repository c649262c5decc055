"""AWS: interruptions of spot instances, and rebalance recommendations."""

from __future__ import annotations

import datetime
import re

from keras_distplug.core.errors import MetadataError
from keras_distplug.preemption.notices.metadata import ADDRESS, TIMEOUT_S, Reply, request
from keras_distplug.preemption.notices.notice import Notice, unix_s

_TOKEN_LIFETIME_S = 21600  # the maximum


class AwsNotices:
    """Polls version 2 of EC2's instance metadata service.

    An interruption is announced two minutes ahead, except for hibernation, which starts
    immediately. A rebalance recommendation may come earlier or at the same time. Not verified on a
    real AWS machine.

    Args:
        base_url: URL of the metadata server. Defaults to its address on every instance.
        timeout_s: Timeout of a request in seconds; a poll makes two requests, or up to five if the
            token has expired. Defaults to 2.
    """

    def __init__(self, base_url: str = ADDRESS, timeout_s: float = TIMEOUT_S) -> None:
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._token: str | None = None

    def poll(self) -> Notice | None:
        """Returns the current notice, or None. Raises MetadataError."""
        reply = self._get("/latest/meta-data/spot/instance-action")
        if reply.status != 404:
            found = reply.fields()
            if not isinstance(found.get("action"), str):
                raise reply.is_not('an "action"')
            at_unix_s = unix_s(found.get("time"), datetime.datetime.fromisoformat)
            return Notice("AWS", f"spot instance-action {found['action']}", at_unix_s, True)
        reply = self._get("/latest/meta-data/events/recommendations/rebalance")
        if reply.status != 404:
            if "noticeTime" not in reply.fields():  # the time of the notice, not of a termination
                raise reply.is_not('a "noticeTime"')
            return Notice("AWS", "rebalance recommendation", None, False)
        return None

    def _get(self, path: str) -> Reply:
        if self._token is None:
            self._token = self._new_token()
        reply = self._get_with(self._token, path)
        if reply.status == 401:
            self._token = self._new_token()
            reply = self._get_with(self._token, path)
        return reply

    def _get_with(self, token: str, path: str) -> Reply:
        headers = {"X-aws-ec2-metadata-token": token}
        return request(self._base_url + path, headers, self._timeout_s)

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIFETIME_S)}
        url = f"{self._base_url}/latest/api/token"
        try:
            reply = request(url, headers, self._timeout_s, method="PUT")
        except MetadataError as error:
            raise MetadataError(
                f"{error}. In a container, the instance's HttpPutResponseHopLimit must be at "
                "least 2."
            ) from error
        if reply.status != 200 or not re.fullmatch("[!-~]+", reply.text):
            raise reply.is_not("a token")
        return reply.text
