"""How the commands print."""

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

_PIPE_WIDTH = 10_000  # nobody looks at the edge of a file
_UNITS = ("B", "KB", "MB", "GB", "TB")


def console() -> Console:
    made = Console(highlight=False, markup=False)
    if not made.is_terminal:
        made.width = _PIPE_WIDTH
    return made


def say(*lines: str) -> None:
    """Prints lines as they are, however long."""
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
        title: What stands above it.
        columns: Their names.
        rows: Their cells.
        right: The columns of numbers.
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
    """`"1.2 MB"`."""
    unit = 0
    while count >= 999.5 and unit + 1 < len(_UNITS):
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"


def numbers(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def plural(count: int, noun: str) -> str:
    """`"1 file"`, `"2 files"`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def time(iso: str) -> str:
    """`"2026-01-31 12:00:00"`, of what is in UTC."""
    return iso.partition("+")[0].replace("T", " ")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
