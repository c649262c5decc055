"""Runs the matrix and writes matrix.json, MATRIX.md and the table in docs/verified.md.

python tests/contracts/table.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS, FULL, PAGE = HERE / "matrix.json", HERE / "MATRIX.md", ROOT / "docs" / "verified.md"
BEGIN, END = "<!-- written by tests/contracts/table.py -->\n", "<!-- end -->\n"

Results = Mapping[str, Mapping[str, Mapping[str, float | str]]]  # family, row, column


def results_of(junit: Path) -> Results:
    found: dict[str, dict[str, dict[str, float | str]]] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        said = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
        if "outcome" in said:
            outcome = said["outcome"]
            row = found.setdefault(said["family"], {}).setdefault(said["row"], {})
            row[said["column"]] = outcome if outcome == "refused" else float(outcome)
    return found


def full_table(results: Results) -> str:
    columns = columns_of(results)
    lines = [
        "# Every row in every set-up",
        "",
        "The largest error, as max|a - b| / max|b| of an array, over weights, optimizer, History "
        "and the other values that a row compares. `tests/contracts/rows.py` defines the rows. "
        "Written by `python tests/contracts/table.py`.",
        "",
        *heading(["", *columns]),
    ]
    for family, rows in results.items():
        lines.append(f"| **{family}** |" + " |" * len(columns))
        for name, row in rows.items():
            lines.append(f"| {name} | " + " | ".join(shown(row[c]) for c in columns) + " |")
    return "\n".join(lines) + "\n"


def short_table(results: Results) -> str:
    """Returns the number of rows and the largest error per family, without refused rows."""
    columns = columns_of(results)
    lines = heading(["", "rows", *columns])
    for family, rows in results.items():
        cells = [shown(largest(row[column] for row in rows.values())) for column in columns]
        lines.append(f"| {family} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def largest(outcomes: object) -> float:
    return max(each for each in outcomes if not isinstance(each, str))  # type: ignore[attr-defined]


def columns_of(results: Results) -> list[str]:
    return list(next(iter(next(iter(results.values())).values())))


def heading(cells: list[str]) -> list[str]:
    return ["| " + " | ".join(cells) + " |", "|" + " --- |" * len(cells)]


def shown(outcome: float | str) -> str:
    if isinstance(outcome, str):
        return outcome
    return f"{outcome:.0e}".replace("e-0", "e-") if outcome else "0"


def between_marks(readme: str) -> str:
    inside = re.search(re.escape(BEGIN) + "(.*?)" + re.escape(END), readme, re.DOTALL)
    assert inside is not None
    return inside.group(1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        rows = HERE / "test_matrix.py"
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(rows),
            "-q",
            "--stage=all",
            f"--junitxml={junit}",
        ]
        failed = subprocess.run(command, cwd=ROOT, check=False).returncode
        if failed:
            sys.exit("Rows failed; nothing was written.")
        results = results_of(junit)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    FULL.write_text(full_table(results))
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(before + begin + short_table(results) + end + after)


if __name__ == "__main__":
    main()
