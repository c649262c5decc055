"""AWS: interruptions of spot instances, and recommendations to leave one."""

from __future__ import annotations

import datetime
import re

from keras_distplug.core.errors import MetadataError
from keras_distplug.preemption.notices.metadata import ADDRESS, TIMEOUT_S, Reply, request
from keras_distplug.preemption.notices.notice import Notice, unix_s

_TOKEN_LIVES_S = 21600  # the longest that is allowed


class AwsNotices:
    """Asks the instance metadata service of EC2, version 2.

    An interruption is announced two minutes ahead, but for hibernation, which begins at once. A
    rebalance recommendation may come earlier, or together with it. Not verified on a real machine
    of AWS.

    Args:
        base_url: Of the metadata server. Defaults to its address on every instance.
        timeout_s: For each request; a poll makes two, and up to five when the token has expired.
    """

    def __init__(self, base_url: str = ADDRESS, timeout_s: float = TIMEOUT_S) -> None:
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._token: str | None = None

    def poll(self) -> Notice | None:
        """What is announced now, if anything. Raises MetadataError."""
        reply = self._get("/latest/meta-data/spot/instance-action")
        if reply.status != 404:
            found = reply.fields()
            if not isinstance(found.get("action"), str):
                raise reply.is_not('an "action"')
            at_unix_s = unix_s(found.get("time"), datetime.datetime.fromisoformat)
            return Notice("AWS", f"spot instance-action {found['action']}", at_unix_s, True)
        reply = self._get("/latest/meta-data/events/recommendations/rebalance")
        if reply.status != 404:
            if "noticeTime" not in reply.fields():  # when it was given, not when the end comes
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
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIVES_S)}
        url = f"{self._base_url}/latest/api/token"
        try:
            reply = request(url, headers, self._timeout_s, method="PUT")
        except MetadataError as error:
            raise MetadataError(
                f"{error} In a container, the instance's HttpPutResponseHopLimit has to be 2 or "
                "more."
            ) from error
        if reply.status != 200 or not re.fullmatch("[!-~]+", reply.text):
            raise reply.is_not("a token")
        return reply.text
