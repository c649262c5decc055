"""Documents, docstrings, comments and messages avoid phrases that read as a translation."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]

CODE = [
    path
    for folder in ("keras_distplug", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

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


# Docstrings say what a function does or returns, not what it is about.
_HEADLESS = re.compile(r"(?:As|Of|Whether|What|Who|Whose)\b")


def prose_in_code(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and messages of a module, each with its line."""
    for node in ast.walk(ast.parse(text)):
        # Messages have several words; names, tags and keys have one.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            without_names = re.sub(r"(?m)^ +\w+: ", "", node.value)  # of arguments
            yield node.lineno, " ".join(without_names.split())
    comments: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1 and comments:
                yield first, " ".join(comments)
                comments = []
            first = token.start[0] if not comments else first
            comments.append(token.string.lstrip("# "))
            last = token.start[0]
    yield first, " ".join(comments)


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, each with its line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found is not None:
                yield node.body[0].lineno, found


def complaints_of_code(name: str, text: str) -> Iterator[str]:
    for number, sentences in prose_in_code(text):
        for each in complaints(name, sentences):
            yield each.replace(":1: ", f":{number}: ", 1)
    for number, found in docstrings(text):
        if _HEADLESS.match(found):
            yield f"{name}:{number}: {found[:40]!r}: start with a verb"


def _folder_of(path: Path) -> str:
    return "/".join(path.relative_to(ROOT).parent.parts[:2])


@pytest.mark.parametrize("folder", sorted(set(map(_folder_of, CODE))))
def test_wording_of_code(folder: str) -> None:
    """No docstring, comment or message contains one of the phrases."""
    found = [
        complaint
        for path in CODE
        if _folder_of(path) == folder
        for complaint in complaints_of_code(str(path.relative_to(ROOT)), path.read_text())
    ]
    assert not found, "\n".join(found)


def test_prose_in_code() -> None:
    """Phrases in docstrings, comments over several lines and messages are found with their line."""
    text = (
        "def function():\n"
        '    """Of nobody."""\n'
        "    # This goes\n"
        "    # on.\n"
        "    raise ValueError(f'{1} is\\ntold')\n"
        "    return 'nobody'\n"
    )
    found = [each.partition(": write instead")[0] for each in complaints_of_code("a.py", text)]
    assert sorted(found) == [
        "a.py:2: 'Of nobody.': start with a verb",
        "a.py:2: 'nobody'",
        "a.py:3: 'goes on'",
        "a.py:5: 'is told'",
    ]


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
