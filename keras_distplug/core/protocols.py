"""The seams between the rooms."""

from __future__ import annotations

from typing import Protocol


class Exchange(Protocol):
    """Short texts between the workers of one run. Never a collective: safe in any thread."""

    def tell(self, topic: str, text: str) -> None:
        """Says `text` to all other workers, once for each `topic`.

        Raises:
            AgreementError: If that is not possible.
        """
        ...

    def hear(self, topic: str, timeout_s: float) -> str:
        """Waits for what another worker says.

        Raises:
            AgreementError: If it says nothing in time, or is gone.
        """
        ...

    def forget(self, topic: str) -> None:
        """Makes room: of what was told of `topic`, and of all topics below it.

        Raises:
            AgreementError: If that is not possible.
        """
        ...
