"""A mixin for dataclasses that users create."""

from __future__ import annotations

import dataclasses
from typing import Any


class ShortRepr:
    """For dataclasses with `repr=False`: a `repr` of the fields that differ from their defaults.

    A field without a default is always shown.
    """

    def __repr__(self) -> str:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self)  # type: ignore[arg-type]
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"
