"""Every example runs as its reader would run it, and keeps its promises."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stores.servers import HOW, Place, moto
from support.cluster import ROOT, environment
from support.needed import missing
from support.watched import Watched

from keras_distplug.cli import main

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

TIMEOUT_S = 180  # far more than any of them takes
GOOD = 0.85  # on the test digits


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Excludes a data set that the user may have downloaded."""
    return environment({"KERAS_HOME": str(tmp_path)})


def command(example: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "examples" / example), *arguments]


def run(env: dict[str, str], folder: Path, example: str, *arguments: str) -> str:
    """Runs an example and returns its output, if it succeeds."""
    done = subprocess.run(
        command(example, *arguments),
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def epochs_in(printed: str) -> list[int]:
    return [int(each) for each in re.findall(r"Epoch (\d+)/", printed)]


def accuracy(printed: str) -> float:
    return float(re.findall(r"validation accuracy ([\d.]+)", printed)[-1])


@pytest.fixture
def watched(env: dict[str, str], tmp_path: Path) -> Iterator[list[Watched]]:
    """Processes that end with the test."""
    started: list[Watched] = []
    yield started
    for each in started:
        each.kill()


def test_plain_fit(env: dict[str, str], tmp_path: Path, watched: list[Watched]) -> None:
    """After a kill, training continues after the last completed epoch, and the model learns; a
    finished run is reported as such."""
    killed = Watched(command("plain_fit.py", "--epochs", "100000"), env, tmp_path)
    watched.append(killed)
    killed.wait_for("Epoch 5/100000", TIMEOUT_S)
    killed.kill()
    last_epoch = epochs_in(killed.output)[-1]

    more = ("--epochs", str(last_epoch + 5))
    printed = run(env, tmp_path, "plain_fit.py", *more)
    at = re.search(rf"resuming at epoch (\d+)/{last_epoch + 5},", printed)
    assert at is not None, printed
    assert 1 <= int(at[1]) <= last_epoch + 1
    assert epochs_in(printed) == list(range(int(at[1]), last_epoch + 6))
    assert f"after {last_epoch + 5} epochs" in printed
    assert accuracy(printed) > GOOD

    again = run(env, tmp_path, "plain_fit.py", *more)
    assert "this run is finished" in again
    assert epochs_in(again) == []
    assert accuracy(again) == accuracy(printed)


def test_two_devices(env: dict[str, str], tmp_path: Path, watched: list[Watched]) -> None:
    """After a kill, a model on two devices reaches the same accuracy, with every part on its
    device."""
    whole = run(env, tmp_path, "two_devices.py", "--directory", "whole")
    killed = Watched(command("two_devices.py"), env, tmp_path)
    watched.append(killed)
    killed.wait_for("Epoch 4/10", TIMEOUT_S)
    killed.kill()
    printed = run(env, tmp_path, "two_devices.py")
    assert "resuming at epoch" in printed
    assert accuracy(printed) == accuracy(whole) > GOOD
    devices = re.findall(r"kernel: (CPU:\d)", printed)
    assert devices == ["CPU:0", "CPU:1", "CPU:1"]


def test_custom_step(env: dict[str, str], tmp_path: Path) -> None:
    """Two replicas learn the same as one, and keep the penalty small."""
    printed = run(env, tmp_path, "custom_step.py")
    line = r"(\d) replica\(s\), validation accuracy ([\d.]+), penalty ([\d.]+)"
    one, two = [tuple(map(float, each)) for each in re.findall(line, printed)]
    assert (one[0], two[0]) == (1, 2)
    assert two[1:] == pytest.approx(one[1:], rel=0.01)
    assert two[2] < 5  # 9.03 without the penalty
    assert accuracy(printed) > GOOD
    difference = re.search(r"largest difference of weights: (\S+)", printed)
    assert difference is not None
    assert float(difference[1]) < 1e-4  # 0.46 without the division by the number of replicas


def test_gradient_norms(env: dict[str, str], tmp_path: Path) -> None:
    """Norms of both replicas are printed after every epoch, and differ, as their parts of a batch
    do."""
    printed = run(env, tmp_path, "gradient_norms.py", "--epochs", "3")
    lines = re.findall(r"epoch (\d), replica (\d): largest gradient norm ([\d.]+)", printed)
    assert [each[:2] for each in lines] == [(e, r) for e in "123" for r in "01"]
    norms = [float(norm) for _, _, norm in lines]
    assert min(norms) > 0
    assert len(set(norms)) == len(norms)


def test_mixed_precision(env: dict[str, str], tmp_path: Path) -> None:
    """An update that is skipped because of the loss scale is not reported as a fault; a damaged
    picture is."""
    printed = run(env, tmp_path, "mixed_precision.py")
    counts = re.search(r"(\d+) batches, (\d+) updates, (\d+) faults", printed)
    assert counts is not None, printed
    batches, updates, faults = map(int, counts.groups())
    assert faults == 6  # one per epoch
    assert updates < batches - faults
    assert printed.count("an update was skipped") == faults
    assert "layers compute in float16, weights are float32" in printed
    assert accuracy(printed) > GOOD


@pytest.mark.stores
def test_checkpoints_in_s3(env: dict[str, str], tmp_path: Path) -> None:
    """The checkpoints are in the bucket, and a new model resumes from them."""
    with moto(tmp_path) as place:
        key, secret = str(place.options["key"]), str(place.options["secret"])
        keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        url, endpoint = f"{place.url}/runs/digits", str(place.options["endpoint_url"])
        where = ("--url", url, "--endpoint", endpoint)
        printed = run(env | keys, tmp_path, "checkpoints_in_s3.py", *where)
        store = s3_of(place)
        there = [each for each in store.find(url) if each.endswith("/MANIFEST.json")]
    assert f"new run {url}/run-0001" in printed
    assert "checkpoint final-00000072: resuming at epoch 4/6, step 72" in printed
    assert epochs_in(printed) == [1, 2, 3, 4, 5, 6]
    assert "after 6 epochs" in printed
    assert accuracy(printed) > GOOD
    assert secret not in printed
    listed = re.findall(r"^((?:step|final)-\d+) ", printed, re.MULTILINE)
    assert "final-00000144" in listed
    assert sorted(listed) == sorted(Path(each).parent.name for each in there)


def s3_of(place: Place) -> Any:
    import s3fs

    return s3fs.S3FileSystem(**place.options, skip_instance_cache=True)


@pytest.mark.stores
def test_local_s3(env: dict[str, str], tmp_path: Path) -> None:
    """Without a store, the example starts one."""
    if not all(map(importlib.util.find_spec, ("moto", "flask", "s3fs"))):
        missing("s3fs, or moto's server,", HOW)
    printed = run(env, tmp_path, "checkpoints_in_s3.py")
    assert "resuming at epoch 4/6, step 72" in printed
    assert re.search("^run-0001, started 20.*, finished *$", printed, re.MULTILINE)


def test_s3_without_moto(env: dict[str, str], tmp_path: Path) -> None:
    """A missing package is reported, with the command that installs it."""
    (tmp_path / "moto.py").write_text("raise ImportError('No module named moto')\n")
    script = command("checkpoints_in_s3.py")
    env = env | {"PYTHONPATH": os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])}
    done = subprocess.run(
        script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 1
    assert "pip install s3fs 'moto[server]'" in done.stderr


def test_tab_walkthrough(
    env: dict[str, str], tmp_path: Path, watched: list[Watched], capsys: pytest.CaptureFixture[str]
) -> None:
    """All faults appear in the figures and in the report, and TensorBoard shows the run."""
    printed = run(env, tmp_path, "tab_walkthrough.py")
    directory = tmp_path / "runs" / "tab_walkthrough"
    assert (directory / "killed").exists()
    assert main(["goodput", str(directory), "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)["runs"]
    first, second = told["attempts"]
    assert (first["exit_code"], second["end"]) == (137, "finished")
    assert 0 < second["first_step"] < second["last_step"] == told["step"] == 5 * 23
    assert f"goodput {100 * told['goodput']:.1f} % of {told['wall_secs']:.1f} s" in printed
    assert f"{first['lost_steps']} lost; worker-0 was killed by SIGKILL" in printed
    assert all(told["secs"][name] > 0 for name in ("step", "input", "redone", "recovery"))
    incidents = printed.partition("\nIncidents\n")[2]
    left_out = re.findall(r"^  update left out: epoch (\d), batch 2: ", incidents, re.MULTILINE)
    assert sorted(set(left_out)) == list("12345")
    assert "  failed: worker-0 was killed by SIGKILL" in incidents
    assert "  slow replica: replica 1 (worker-0 on " in incidents
    page = (directory / "report.html").read_text()
    assert "worker-0 was killed by SIGKILL" in page
    [run_shown] = json.loads(page.partition('id="runs">')[2].partition("</script>")[0])["runs"]
    counts = [each["count"] for each in run_shown["incidents"] if each["kind"] == "update_left_out"]
    assert sum(counts) >= len(left_out)

    serving = Watched(command("tab_walkthrough.py", "--serve"), env, tmp_path)
    watched.append(serving)
    serving.wait_for("at http://localhost:", TIMEOUT_S)
    address = re.search(r"at (http://localhost:\d+/)", serving.output)
    assert address is not None
    assert epochs_in(serving.output) == []  # the run already exists
    with urllib.request.urlopen(f"{address[1]}data/plugin/distplug/runs", timeout=60) as answer:
        [seen] = json.load(answer)
    assert (seen["name"], seen["attempted"]) == (f"tab_walkthrough/{told['name']}", 2)
