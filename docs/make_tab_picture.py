"""Makes docs/tab.png: TensorBoard's tab "Distplug", with a run that has gone wrong.

    python docs/make_tab_picture.py

Runs examples/tab_walkthrough.py, starts TensorBoard on its folder, and takes a screenshot with
Chromium. Needs Chromium and Pillow (`pip install pillow`), and about a minute.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent
WIDTH, HEIGHT = 1100, 1000
COLORS = 64  # keeps the file small


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if browser is None:
        raise SystemExit("Expected Chromium on the PATH. Install it: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(DOCS.parent / "examples", folder, dirs_exist_ok=True)
        subprocess.run([sys.executable, "tab_walkthrough.py"], cwd=folder, check=True)
        page, shot = Path(folder, "page"), Path(folder, "tab.png")
        board = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--port", "0"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            assert board.stdout is not None
            url = next(filter(None, (re.search(r"http://\S+", line) for line in board.stdout)))[0]
            subprocess.run(
                [
                    *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                    *(f"--user-data-dir={page}", f"--window-size={WIDTH},{HEIGHT}"),
                    *("--virtual-time-budget=20000", f"--screenshot={shot}", f"{url}#distplug"),
                ],
                check=True,
                timeout=120,
            )
        finally:
            board.kill()
            board.wait()
        picture = Image.open(shot).convert("RGB").quantize(COLORS)
        picture.save(DOCS / "tab.png", optimize=True)


if __name__ == "__main__":
    main()
