"""The published tables are those written by the last run of all rows."""

from __future__ import annotations

import json

from contracts import table
from contracts.rows import ROWS
from contracts.test_matrix import COLUMNS


def results() -> table.Results:
    found: table.Results = json.loads(table.RESULTS.read_text())
    return found


def test_all_rows_are_in_the_table() -> None:
    """No row or column was added without running `tests/contracts/table.py`."""
    assert {f: list(rows) for f, rows in results().items()} == {f: list(r) for f, r in ROWS.items()}
    for family, rows in results().items():
        for name, row in rows.items():
            assert list(row) == list(COLUMNS), f"{family}: {name}"


def test_table_matches_the_rows() -> None:
    """Errors are within the limit of the row; rows are refused if the row says so."""
    for family, rows in results().items():
        for name, row in rows.items():
            expected = ROWS[family][name]
            for outcome in row.values():
                if expected.refused is not None:
                    assert outcome == "refused"
                else:
                    assert float(outcome) <= expected.error


def test_tables() -> None:
    """docs/verified.md and MATRIX.md contain the tables as written."""
    assert table.between_marks(table.PAGE.read_text()) == table.short_table(results())
    assert table.FULL.read_text() == table.full_table(results())
