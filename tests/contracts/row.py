"""What a row of the matrix is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contracts import uses


@dataclass(frozen=True)
class Row:
    """One thing that has to be right.

    Args:
        build: Makes the compiled model, inside the strategy's scope.
        use: What is done with it; gives what is compared.
        reference: Gives the outcome to be had on a number of replicas, with plain Keras in one
            process. None: the same use of the same model.
        refused: What an error has to say, where there is to be one.
        error: The largest that passes, as max|a - b| / max|b| of each array.
        policy: Keras' dtype policy.
        needs: A name that the installed Keras may not have yet, such as `optimizers.Muon`.
        lowest: Whether the lowest supported versions run it, too.
    """

    build: Callable[[], Any]
    use: uses.Use = uses.steps
    reference: Callable[[Row, int], uses.Outcome] | None = None
    refused: str | None = None
    error: float = 1e-5
    policy: str = "float32"
    needs: str | None = None
    lowest: bool = False
