"""The first screen of README.md and the site: its script, killed and started again, prints that."""

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
# How long it takes, and where a kill meets it.
VARIABLE = [
    (r"\S*runs/digits", "runs/digits"),
    (r"- \d+s - \d+ms/step", "- TIME"),
    (r"step-\d{8}: resuming at epoch \d+/20, (batch \d+, )?step \d+", "CHECKPOINT"),
    (r"at least \d+ steps", "STEPS"),
    (r"loss: \d\.\d{4}", "LOSS"),
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


def test_what_it_prints(tmp_path: Path) -> None:
    """Both starts print what the page shows, and the interrupted epoch ends with the same loss."""
    (tmp_path / "train.py").write_text(block("python"))
    starts = [started(tmp_path, killed_at="Epoch 12/20"), started(tmp_path)]
    losses = [re.search(r"Epoch 11/20\n.*loss: (\S+)", each) for each in starts]
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[0][1] == losses[1][1]

    _, first, second = block("console").split("$ python train.py\n")
    shown = first.removeprefix("...\n").removesuffix("Killed\n")
    assert "\n".join(normalized(shown)) in "\n".join(normalized(starts[0]))
    assert "\n".join(normalized(second)) in "\n".join(normalized(starts[1]))
