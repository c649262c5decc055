"""Prints text, tables and JSON for the commands."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_distplug.core.printable import printable

_PIPE_WIDTH = 10_000  # a file has no width: lines are never broken
_UNITS = ("B", "KB", "MB", "GB", "TB")


def console() -> Console:
    made = Console(highlight=False, markup=False)
    if not made.is_terminal:
        made.width = _PIPE_WIDTH
    return made


def say(*lines: str) -> None:
    """Prints lines without breaking them, however long they are."""
    printed = console()
    for line in lines:
        printed.print(_text(line), soft_wrap=True)


def _text(line: str) -> Text:
    return Text(printable(line))


def say_json(document: Mapping[str, Any]) -> None:
    json.dump(_plain(document), sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")


def say_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """Prints a table.

    Args:
        title: The line above the table; `""` for none.
        columns: The names of the columns.
        rows: The cells of every row.
        right: The names of the columns that are aligned to the right: numbers.
    """
    table = Table(
        title=_text(title) if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        show_header=any(columns),
    )
    for column in columns:
        side = "right" if column in right else "left"
        table.add_column(_text(column), justify=side, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(_text, row))
    console().print(table)


def size(count: float) -> str:
    """Returns a number of bytes as text, such as `"1.2 MB"`."""
    unit = 0
    while count >= 999.5 and unit + 1 < len(_UNITS):
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"


def numbers(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def plural(count: int, noun: str) -> str:
    """Returns `"1 file"`, `"2 files"`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def time(iso: str) -> str:
    """Returns a time in UTC without its zone, such as `"2026-01-31 12:00:00"`."""
    return iso.partition("+")[0].replace("T", " ")


def age(secs: float) -> str:
    """Returns a duration in its largest unit, such as `"5 min"` or `"3 d"`."""
    for unit, unit_secs in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if secs >= unit_secs:
            return f"{secs / unit_secs:.0f} {unit}"
    return f"{max(secs, 0):.0f} s"


def _plain(value: Any) -> Any:
    """Returns `value` with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
