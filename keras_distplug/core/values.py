"""What values that users give have in common."""

from __future__ import annotations

import dataclasses
from typing import Any


class Shown:
    """For dataclasses with `repr=False`: a `repr` with the fields that differ from their defaults.

    Of a field without one, the value is always shown.
    """

    def __repr__(self) -> str:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self)  # type: ignore[arg-type]
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"
