"""Documents avoid phrases that read as a translation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]

REMEDIES = {
    r"\bto the bit\b": "bit for bit, bit-identical",
    r"\b(?:is|are|was|were|be|been) told\b": "is reported, is notified",
    r"\btold to go\b": "preempted",
    r"\bnobody\b": "no worker, no one, or the passive",
    r"\bwhoever\b": "the worker that, the caller",
    r"\b(?:begun|began)\b": "started",
    r"\bgo(?:es)? on\b": "continues, resumes",
    r"\bwent on\b": "continued, resumed",
    r"\bget(?:s)? on\b": "makes progress",
    r"\bin a row\b": "consecutive",
    r"\bonce more\b": "again",
    r"\b(?:anew|afresh)\b": "again, from scratch",
    r"\bbehind (?:an? |the |that |its |this |each |every )?(?:batch|step|epoch|save|checkpoint)": (
        "after"
    ),
    r"\bbut for\b": "except",
    r"\b(?:set|sets) aside\b": "quarantined",
    r"\bput right\b": "fixed",
    r"\bmend(?:s|ed)?\b": "fix, repair",
    r"\bleft out\b": "skipped",
    r"\btaken up\b": "restored, resumed from",
    r"\bof (?:its|your|their|his|her) own\b": "its own, custom",
    r"\bbesides?\b": "alongside, next to, compared with, also",
    r"\btime-outs?\b": "timeout",
    r"\bso (?:many|often)\b": "this many, N",
    r"\bdata are\b": "data is",
    r"\bhow far\b": "the progress of",
}
PATTERNS = {re.compile(each, re.IGNORECASE): remedy for each, remedy in REMEDIES.items()}

# Not prose: fenced blocks, comments, quoted messages and code. Newlines stay, for line numbers.
_NOT_PROSE = re.compile(
    r"^```.*?^```$|^~~~.*?^~~~$|<!--.*?-->|^> [^\n]*$|(`+)[^`]+?\1|\]\([^)\s]*\)",
    re.DOTALL | re.MULTILINE,
)


def prose(text: str) -> str:
    return _NOT_PROSE.sub(lambda found: re.sub(r"[^\n]", "", found[0]), text)


def complaints(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(prose(text).splitlines(), start=1):
        for pattern, remedy in PATTERNS.items():
            for found in pattern.finditer(line):
                yield f"{name}:{number}: {found[0]!r}: write instead: {remedy}"


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_wording(path: Path) -> None:
    """No page contains one of the phrases."""
    name = str(path.relative_to(ROOT))
    found = list(complaints(name, path.read_text()))
    assert not found, "\n".join(found)


def test_every_pattern_matches() -> None:
    """Every phrase is found in prose, with its line."""
    phrases = [
        *("to the bit", "was told", "told to go", "Nobody", "whoever", "begun", "goes on"),
        *("went on", "gets on", "in a row", "once more", "anew", "behind each batch", "but for"),
        *("set aside", "put right", "mend", "left out", "taken up", "of its own", "beside"),
        *("time-out", "so many", "data are", "how far"),
    ]
    assert len(phrases) == len(PATTERNS)
    for pattern, phrase in zip(PATTERNS, phrases, strict=True):
        assert pattern.search(phrase), f"{pattern.pattern} does not match {phrase!r}"
        [*found] = complaints("page.md", f"First line.\nThis is {phrase} here.\n")
        assert found
        assert all(each.startswith("page.md:2: ") for each in found)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nnobody = 1  # to the bit\n```\n",
        "> it was told\n",
        "the message `goes on, once\nmore` is quoted",
        "<!-- hidden\nbegun = 1\n-->\n",
        "a [page](begun/anew.md)",
        "It is behind the proxy, in an arrow; a folder is folded; we recommend it.",
    ],
)
def test_no_false_alarm(text: str) -> None:
    """Code, quoted messages, comments, addresses and similar words are allowed."""
    assert list(complaints("page.md", text)) == []
