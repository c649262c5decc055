"""The first screen of README.md and of the site: its script, killed and restarted, prints the lines
that it shows."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn", reason="pip install scikit-learn")

from support.cluster import ROOT, environment

pytestmark = [pytest.mark.tf, pytest.mark.timeout(240)]

README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
# These depend on the duration, and on where the kill happens.
VARIABLE = [
    (r"\S*runs/digits", "runs/digits"),
    (r"- \d+s - \d+[mu]?s/step", "- TIME"),
    (r"step-\d{8}: resuming at epoch \d+/20, (batch \d+, )?step \d+", "CHECKPOINT"),
    (r"(\(attempt 2)(?:; the log of attempt 1 ends at step \d+)?\)", r"\1)"),
    (r"loss: \d\.\d{4}", "LOSS"),
    (r"Epoch \d+/20", "EPOCH"),
]


def first_screen(page: Path) -> str:
    screen, heading, _ = page.read_text().partition("\n## Install\n")
    assert heading
    return screen


def block(kind: str) -> str:
    found = re.search(rf"^```{kind}\n(.*?)^```$", first_screen(README), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def normalized(text: str) -> list[str]:
    for pattern, name in VARIABLE:
        text = re.sub(pattern, name, text)
    return text.splitlines()


def test_site_starts_with_the_readme() -> None:
    links = first_screen(README).replace("](docs/", "](")
    assert first_screen(INDEX) == links


def started(folder: Path, killed_at: str | None = None) -> str:
    """Returns what the script prints; it is killed when it prints a line."""
    printed = []
    with subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=folder,
        env=environment({"TF_CPP_MIN_LOG_LEVEL": "3"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if killed_at is not None and killed_at in line:
                process.kill()
        code = process.wait(60)
    assert code == (0 if killed_at is None else -signal.SIGKILL), "".join(printed)
    return "".join(printed)


def losses(printed: str) -> dict[str, str]:
    """Returns the loss of every epoch that ended, by the epoch's number."""
    return dict(re.findall(r"^Epoch (\d+)/20\n.* loss: (\S+)$", printed, re.MULTILINE))


def test_printed_lines(tmp_path: Path) -> None:
    """Both starts print what the page shows, with the losses of a run that nothing interrupts."""
    runs = [tmp_path / "interrupted", tmp_path / "whole"]
    for folder in runs:
        folder.mkdir()
        (folder / "train.py").write_text(block("python"))
    starts = [started(runs[0], killed_at="Epoch 12/20"), started(runs[0])]
    expected = losses(started(runs[1]))
    assert list(expected) == [str(epoch) for epoch in range(1, 21)]
    assert set(expected) == {epoch for start in starts for epoch in losses(start)}
    for start in starts:
        assert losses(start).items() <= expected.items()

    _, first, second = block("console").split("$ python train.py\n")
    shown = first.removeprefix("...\n").removesuffix("Killed\n")
    assert "\n".join(normalized(shown)) in "\n".join(normalized(starts[0]))
    shown_again = second.removesuffix("...\n")
    assert "\n".join(normalized(shown_again)) in "\n".join(normalized(starts[1]))
