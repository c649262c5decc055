"""Interfaces between subpackages."""

from __future__ import annotations

from typing import Protocol


class Exchange(Protocol):
    """Short messages between the workers of a run. Never a collective: safe in any thread."""

    def send(self, topic: str, text: str) -> None:
        """Sends `text` to all other workers, once per `topic`.

        Raises:
            AgreementError: If the message cannot be sent.
        """
        ...

    def receive(self, topic: str, timeout_s: float) -> str:
        """Waits up to `timeout_s` seconds for another worker's message.

        Raises:
            AgreementError: If no message arrives in time, or the worker is gone.
        """
        ...

    def forget(self, topic: str) -> None:
        """Deletes the messages of `topic` and of all topics below it.

        Raises:
            AgreementError: If they cannot be deleted.
        """
        ...
