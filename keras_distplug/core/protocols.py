"""The seams between the rooms."""

from __future__ import annotations

from typing import Protocol


class Agreement(Protocol):
    """How the workers of one run come to one mind. Never a collective: safe at any moment."""

    def from_chief(self, topic: str, value: str | None) -> str:
        """The chief gives `value`; everyone returns it. Other workers give None and wait."""
        ...

    def to_chief(self, topic: str, value: str) -> list[str] | None:
        """Everyone gives a value; the chief returns all of them, in the workers' order, and others
        None, at once. For what the others have no use for: it would be sent to each of them."""
        ...

    def gather(self, topic: str, value: str) -> list[str]:
        """Everyone gives a value; everyone returns all of them, in the workers' order."""
        ...

    def first_complaint(self, topic: str, complaint: str | None) -> str | None:
        """Everyone says what is wrong, or None; everyone returns the complaint of the first worker
        that has one, or None once all have said that nothing is."""
        ...

    def barrier(self, topic: str) -> None:
        """Returns on all workers once all workers have called it."""
        ...


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
