"""A row of the matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contracts import uses


@dataclass(frozen=True)
class Row:
    """One case that must give the right result.

    Args:
        build: A function that makes the compiled model, inside the strategy's scope.
        use: A function that uses the model and returns the values to compare.
        reference: A function that returns the expected outcome for a number of replicas, with plain
            Keras in one process. None for the same use of the same model.
        refused: A part of the expected error message; None if no error is expected.
        error: The largest accepted error, as max|a - b| / max|b| per array.
        policy: Keras' dtype policy.
        needs: A name that the installed Keras may not have yet, such as `optimizers.Muon`.
        lowest: True if the case also runs with the lowest supported versions.
    """

    build: Callable[[], Any]
    use: uses.Use = uses.steps
    reference: Callable[[Row, int], uses.Outcome] | None = None
    refused: str | None = None
    error: float = 1e-5
    policy: str = "float32"
    needs: str | None = None
    lowest: bool = False
