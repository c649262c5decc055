"""Several calls of `fit` in a script with one directory, trained by several processes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from support.cluster import Ended, run_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = str(Path(__file__).parents[1] / "workers" / "phases.py")
BATCHES = 6  # in an epoch of the first two fits; the third has half as many samples


def run(folder: Path, workers: int, *given: str, options: tuple[str, ...] = ()) -> Ended:
    folder.mkdir(exist_ok=True)
    return run_job([SCRIPT, str(folder), *given], workers, *options, timeout_s=240)


def weights(ended: Ended) -> set[str]:
    """Returns the weights of both models on all workers."""
    assert ended.returncode == 0, ended.output
    found = re.findall("weights ([0-9a-f ]{129})$", ended.output, re.MULTILINE)
    assert found, ended.output
    return set(found)


def batches(folder: Path, name: str) -> list[tuple[int, int, int]]:
    """Returns the batches trained by a process: number of its `fit`, epoch, batch."""
    lines = (folder / f"batches-{name}").read_text().splitlines()
    return [(fit, epoch, batch) for fit, epoch, batch in (map(int, line.split()) for line in lines)]


def test_two_workers(tmp_path: Path) -> None:
    """A worker is killed in the second fit: only that one resumes, mid-epoch.

    Both models are the same as without the kill, on both workers. A restart with other labels is
    refused, and one of the unchanged script trains nothing.
    """
    plain, disturbed = tmp_path / "plain", tmp_path / "disturbed"
    expected = weights(run(plain, 2))
    assert len(expected) == 1
    ended = run(disturbed, 2, "worker-1")
    assert (disturbed / "killed").exists()
    assert weights(ended) == expected
    assert "1 restart\n" in ended.output
    assert re.search(r"run-0001, .*: this run is finished", ended.output)
    assert re.search(r"run-0002, .*: resuming at epoch 2/2, batch [23]", ended.output)
    trained = batches(disturbed, "worker-1")
    assert trained[: BATCHES * 4 - 4] == batches(plain, "worker-1")[: BATCHES * 4 - 4]
    assert max(Counter(trained).values()) <= 2  # the batches after the checkpoint
    assert len(trained) <= len(batches(plain, "worker-1")) + 2
    before = batches(disturbed, "worker-0")
    refused = run(disturbed, 2, "", "1", options=("--max-restarts", "0"))
    assert refused.returncode == 1
    assert refused.output.count("the values of `y` have changed") >= 2
    assert weights(run(disturbed, 2)) == expected
    assert batches(disturbed, "worker-0") == before


def test_parameter_servers(tmp_path: Path) -> None:
    """The chief is killed in the second fit: the first one is not repeated."""
    ended = run(tmp_path, 1, "chief-0", options=("--ps", "1"))
    assert ended.returncode == 0, ended.output
    assert (tmp_path / "killed").exists()
    assert "rate 0.0001" in ended.output
    trained = batches(tmp_path, "chief-0")
    assert Counter(fit for fit, _, _ in trained)[1] == 2 * BATCHES
    assert len(trained) <= 4 * BATCHES + BATCHES // 2 + 2
    before = len(trained)
    again = run(tmp_path, 1, options=("--ps", "1"))
    assert again.returncode == 0, again.output
    assert len(batches(tmp_path, "chief-0")) == before
