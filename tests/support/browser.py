"""Renders pages in a browser."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

from support.needed import missing

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Shown(HTMLParser):
    """The text of elements, and the cells of every table."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.cards: list[str] = []
        self.legend: list[str] = []
        self.labels: list[str] = []
        self._open: list[str] = []
        self._name = ""
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        given = dict(attrs)
        if given.get("role") == "region":
            self._name = given["aria-label"] or ""
            self.tables[self._name] = []
        if given.get("role") == "img":
            self.labels.append(given["aria-label"] or "")
        if tag == "tr" and self._name:
            self.tables[self._name].append([])
        if tag in ("td", "th") and self._name:
            self.tables[self._name][-1].append("")
        if tag in ("dt", "dd"):
            self.cards.append("")
        if tag == "li":
            self.legend.append("")

    def handle_data(self, data: str) -> None:
        if "td" in self._open[-3:] or "th" in self._open[-3:]:
            self.tables[self._name][-1][-1] += data
        if ("dt" in self._open[-3:] or "dd" in self._open[-3:]) and "small" not in self._open[-3:]:
            self.cards[-1] += data
        if "li" in self._open[-4:]:
            self.legend[-1] += data

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass


def browsed(url: str, folder: Path, secs: int = 10) -> tuple[str, str]:
    """Returns the document after its scripts have run, and the browser's error messages.

    These include violations of policies, and requests to other machines, which all fail.

    Args:
        url: Address of the page.
        folder: Folder for the browser's files.
        secs: Time by the page's virtual clock, which waits only for responses.
    """
    ended = _run(url, folder, "--dump-dom", secs=secs)
    console = [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]
    return ended.stdout, "\n".join(console)


def photographed(url: str, folder: Path, picture: Path, *, is_dark: bool = False) -> None:
    """Takes a screenshot for people to look at."""
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if is_dark else []
    size = "--window-size=1200,2400"
    _run(url, folder, "--hide-scrollbars", size, f"--screenshot={picture}", *dark)


def _run(url: str, folder: Path, *options: str, secs: int = 10) -> subprocess.CompletedProcess[str]:
    if CHROMIUM is None:
        missing("Chromium", "apt-get install chromium")
    return subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost",
            f"--user-data-dir={folder / 'profile'}",
            f"--virtual-time-budget={1000 * secs}",
            *options,
            url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
