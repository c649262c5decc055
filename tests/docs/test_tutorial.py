"""The tutorial, executed as a reader would: its scripts, its commands, and every line they print.

    python tests/docs/test_tutorial.py

writes the outputs of a new execution into the page, for a change of messages that is intended.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from stores.servers import moto
from support.cluster import ROOT, environment
from support.watched import Watched

pytestmark = [
    pytest.mark.tf,
    pytest.mark.cluster,
    pytest.mark.stores,
    pytest.mark.timeout(600),
]

PAGE = ROOT / "docs" / "tutorial.md"
STEP_TIMEOUT_S = 120  # several times what the slowest step takes on a busy machine
HOME = "~/tutorial"  # the page's name for its working folder

# Parts of a line that differ between executions, and their placeholders.
VARIABLE = (
    (r"\b\d+m?s - \d+[mu]?s/step\b", "<time>"),
    (r"\b(?:final )?loss:? \d+\.\d+", "<loss>"),  # compared by `losses`
    (r"step-\d+(: resuming at epoch \d/\d), batch \d+, step \d+", r"<step>\1, batch <n>, step <n>"),
    (
        r"(\(attempt 2)(?:; [^()]*(?:\blost\b|\bends at step\b)[^()]*)?\)",
        r"\1)",
    ),  # depends on when it was killed
    # the checkpoint before the last one: a busy machine skips some
    (r"^step-\d+ +committed +\d+ +\d+ +0\b(?!.*epochs)", "step-<n>  committed  <n>  <n>  0"),
    (r"\b\d+\.\d s\b", "<time>"),
    (r"^\[distplug \d\d:\d\d:\d\dZ\]", "[distplug <time>]"),
    (r"TensorBoard \S+ at http://\S+", "TensorBoard <version> at <url>"),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b", "<date>"),
    (r"\b\d+(?:\.\d+)? KB\b", "<size>"),
    (r" +\d\.\d{3,4}(?= |$)", " <metric>"),  # a column of `keras-distplug ls`
    (r" {2,}", "  "),  # the width of columns
)
# Lines that are not always printed.
OMITTED = (
    # TensorFlow's log, also of a worker that notices the loss of another before it is stopped
    r"WARNING: All log messages before absl",
    r"[IWEF]\d{4} \d\d:\d\d:",
    r"Additional GRPC error information",
    r":UNKNOWN:|:\{\"created\"",
    # TensorBoard's notes
    r"NOTE: Using experimental fast data loading",
    r" +\"--load_fast=false\"",
    r" +https://github.com/tensorflow/tensorboard/",
    r"Serving TensorBoard on localhost",
    r"$",
    # StragglerWatchdog, on a busy machine, where one worker may really be slower
    r"keras_distplug: .*\bworker-\d on .*\d ms\b",
    r"keras_distplug: straggler: ",
    # a save that a busy machine delayed
    r"keras_distplug: \d+ scheduled checkpoints? (?:was|were) skipped",
)
_OMITTED = re.compile(rf"(\[worker-\d\] )?(?:{'|'.join(OMITTED)})")


@dataclass(frozen=True)
class Block:
    """A fenced block of the page.

    Args:
        kind: Its language.
        text: Its content.
        span: The place of `text` in the page.
    """

    kind: str
    text: str
    span: tuple[int, int]

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@dataclass(frozen=True)
class Step:
    """A block of commands that was executed, with the output on the page and the real one."""

    commands: Block
    shown: Block
    printed: str


def blocks_of(page: str) -> list[Block]:
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [Block(each[1], each[2], each.span(2)) for each in found]


def patched(script: str, diff: Sequence[str]) -> str:
    """Applies a diff of which every run of `-` lines occurs once in the script."""
    text = script
    for old, new in hunks(diff):
        assert text.count(old) == 1, f"expected once in the script:\n{old}"
        text = text.replace(old, new)
    return text


def hunks(diff: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Parts of a diff, separated by empty lines."""
    for part in "\n".join(line.rstrip() for line in diff).split("\n\n"):
        lines = part.splitlines()
        yield tuple(  # type: ignore[misc]
            "".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +")
        )


def serves_the_tab(shell: Watched) -> None:
    """Waits for TensorBoard's line, and requests the runs that the tab lists."""
    shell.wait_for("http://", STEP_TIMEOUT_S)
    shell.await_(lambda: re.search(r"http://\S+/ ", shell.output), STEP_TIMEOUT_S)
    address = re.findall(r"http://\S+/", shell.output)[-1]
    deadline = time.monotonic() + STEP_TIMEOUT_S
    url = f"{address}data/plugin/distplug/runs"
    with urllib.request.urlopen(url, timeout=deadline - time.monotonic()) as answer:
        assert [each["attempted"] for each in json.load(answer)] == [2, 2]
    shell.kill()


# Commands that run until the reader stops them: what to add, and what to do instead of waiting.
SERVERS: dict[str, tuple[str, Callable[[Watched], None]]] = {
    "keras-distplug report runs/two -o report.html\ntensorboard --logdir runs": (
        "--port 0",
        serves_the_tab,
    ),
}


def run(commands: Block, env: Mapping[str, str], folder: Path) -> str:
    """Runs a block of commands in bash, and returns its output."""
    text = commands.text.strip()
    option, served = SERVERS.get(text, ("", None))
    shell = Watched(["bash", "-c", f"{text} {option}".strip()], env, folder)
    try:
        if served is not None:
            served(shell)
        else:
            shell.code(STEP_TIMEOUT_S)
    finally:
        shell.kill()
    return shell.output


def execute(page: str, env: Mapping[str, str], folder: Path) -> list[Step]:
    """Runs all blocks of the page in order."""
    blocks, steps = blocks_of(page), []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.kind == "python":
            name = block.lines[0].removeprefix("# ")
            (folder / name).write_text(block.text)
        elif block.kind == "diff":
            script = folder / "train.py"
            script.write_text(patched(script.read_text(), block.lines))
        elif block.kind == "sh":
            assert following is not None
            assert following.kind == "text", f"no output follows:\n{block.text}"
            printed = run(block, env, folder).replace(str(folder), HOME)
            steps.append(Step(block, following, without_omitted(printed)))
        else:
            assert block.kind == "text", block.kind
    return steps


def without_omitted(printed: str) -> str:
    lines = printed.splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if not _OMITTED.match(line))


def placeholders(line: str) -> str:
    for pattern, placeholder in VARIABLE:
        line = re.sub(pattern, placeholder, line)
    return line.strip()


def normalised(text: str) -> dict[str, list[str]]:
    """Returns lines with placeholders, separately for the supervisor, every worker and everything
    else, because processes print concurrently."""
    streams: dict[str, list[str]] = {}
    for line in text.splitlines():
        prefix = re.match(r"\[[\w-]+\] |", line)
        assert prefix is not None
        streams.setdefault(prefix[0], []).append(placeholders(line))
    return streams


def losses(text: str) -> list[str]:
    return re.findall(r"\bfinal loss (\d+\.\d+)", text)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    return execute_page(tmp_path_factory.mktemp("tutorial"))


def execute_page(folder: Path) -> list[Step]:
    home, store = folder / "tutorial", folder / "store"
    home.mkdir()
    store.mkdir()
    with moto(store) as place:
        env = environment(
            {
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "AWS_ENDPOINT_URL": str(place.options["endpoint_url"]),
                "AWS_ACCESS_KEY_ID": str(place.options["key"]),
                "AWS_SECRET_ACCESS_KEY": str(place.options["secret"]),
            }
        )
        return execute(PAGE.read_text(), env, home)


def test_outputs(steps: list[Step]) -> None:
    """Every line on the page is printed, and no other line."""
    assert len(steps) == 6
    for step in steps:
        message = f"after\n{step.commands.text}\nthis was printed:\n{step.printed}"
        assert normalised(step.printed) == normalised(step.shown.text), message


def test_losses(steps: list[Step]) -> None:
    """The resumed training ends with the loss of the plain script, on the page and in reality."""
    for plain, killed, resumed in ([step.printed for step in steps[:3]], shown(steps)[:3]):
        assert losses(killed) == []
        assert len(losses(plain)) == 1
        assert losses(resumed) == losses(plain)
    for text in (steps[3].printed, shown(steps)[3]):
        worker_0, worker_1 = losses(text)
        assert worker_0 == worker_1


def shown(steps: list[Step]) -> list[str]:
    return [step.shown.text for step in steps]


@pytest.mark.parametrize("step", range(6))
def test_changed_line_is_noticed(step: int, steps: list[Step]) -> None:
    """The comparison fails if one line differs by a word, is missing, or is new."""
    printed = steps[step].printed.splitlines()
    expected = normalised(steps[step].shown.text)
    for number, line in enumerate(printed):
        words = re.findall(r"\b[A-Za-z]{3,}\b", re.sub(r"<\w+>", "", placeholders(line)))
        before, found, after = line.rpartition(words[-1] if words else "\n")
        changed = f"{before}changed{after}" if found else f"{line} more"
        for lines in ([changed], [], [line, line]):
            text = "\n".join([*printed[:number], *lines, *printed[number + 1 :]])
            assert normalised(text) != expected, text


def write() -> None:
    """Replaces the outputs on the page by those of a new execution."""
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for step in reversed(execute_page(Path(folder))):
            start, end = step.shown.span
            printed = re.sub(r"localhost:\d+", "localhost:6006", step.printed)
            page = page[:start] + printed + page[end:]
    PAGE.write_text(page)


if __name__ == "__main__":
    write()
