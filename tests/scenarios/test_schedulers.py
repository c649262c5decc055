"""The examples for Slurm and Kubernetes, with mock schedulers; test_real_slurm.py has a real one.

The tests imitate Kubeflow's operator, the Job controller and the kubelet as documented. The
scripts, processes, signals and exit codes are real.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cluster import ROOT, environment, run_workers
from support.indexed_job import jobset_of, running
from support.needed import missing
from support.slurm import FakeSlurm
from support.tfjob import FakeOperator

pytestmark = pytest.mark.timeout(1000)

EXAMPLES = ROOT / "examples"
SBATCH = EXAMPLES / "slurm" / "train.sbatch"
TFJOB = EXAMPLES / "kubernetes" / "tfjob.yaml"
CHECKSUM = re.compile(r"sha256 ([0-9a-f]{64})")
RESUMED = "resuming at epoch"
HOW = "Run pip install '.[test-schedulers]'."
IN_TRAINING = "Epoch 3/10"


@pytest.fixture(scope="module")
def checksum(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checksum of weights and optimizer after an uninterrupted training by two workers."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    command = [str(EXAMPLES / "train.py"), "--directory", str(folder)]
    ended = run_workers(command, 2, timeout_s=300)
    assert [each.returncode for each in ended] == [0, 0], ended[0].output
    [found] = {sha for each in ended for sha in CHECKSUM.findall(each.output)}
    return found


# Slurm


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin")


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def directives(script: Path) -> dict[str, str]:
    """Returns the script's options for `sbatch`."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE)
    return dict(found)


def test_batch_script() -> None:
    """Bash can parse the script, which requests everything that resuming needs from Slurm."""
    subprocess.run(["bash", "-n", str(SBATCH)], check=True, timeout=60)
    asked = directives(SBATCH)
    first_command = SBATCH.read_text().index("\nsrun ")
    assert SBATCH.read_text().rindex("#SBATCH") < first_command  # sbatch stops reading here
    name, _, before_s = asked["signal"].partition("@")
    assert name == "USR1"  # without "B:", which would signal the shell instead of the workers
    assert f"--grace-secs {before_s} " in SBATCH.read_text()
    assert "requeue" in asked
    assert (
        asked["open-mode"] == "append"
    )  # otherwise every run deletes the output of the previous one


@pytest.mark.ci  # needs a package that `[test]` does not install
def test_shellcheck() -> None:
    """shellcheck accepts the script."""
    beside = str(Path(sys.executable).parent)
    shellcheck = shutil.which("shellcheck", path=os.pathsep.join([beside, os.environ["PATH"]]))
    if shellcheck is None:
        missing("shellcheck", HOW)
    subprocess.run([shellcheck, str(SBATCH)], check=True, timeout=60)


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [
        *[(code, 0, False) for code in (0, 1, 93, 130, 143)],
        *[(code, 9, True) for code in (134, 137, 200, 201)],
        (201, 10, False),
    ],
)
def test_exit_codes_of_srun(
    code: int, restarts: int, is_requeued: bool, slurm: FakeSlurm, tmp_path: Path
) -> None:
    """Unexpected exits requeue the job, a limited number of times; recurring errors do not.

    A preempted job has already requeued itself. The job's exit code is that of srun.
    """
    program(tmp_path / "bin", "srun", f"exit {code}")
    env = environment(slurm.env) | {"SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", str(SBATCH)], env=env, cwd=ROOT, timeout=60)
    assert done.returncode == code
    assert slurm.asked() == ["requeue 1234"] * is_requeued


# Kubernetes


@pytest.fixture
def tfjob() -> dict[str, Any]:
    if importlib.util.find_spec("yaml") is None:
        missing("PyYAML", HOW)
    return importlib.import_module("yaml").safe_load(TFJOB.read_text())


@pytest.mark.ci  # needs a package that `[test]` does not install
def test_tfjob(tfjob: dict[str, Any]) -> None:
    """The job has the fields of Kubeflow's TFJob v1, in the right places."""
    assert (tfjob["apiVersion"], tfjob["kind"]) == ("kubeflow.org/v1", "TFJob")
    assert set(tfjob) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(tfjob["spec"]) <= {
        *("enableDynamicWorker", "runPolicy", "successPolicy", "tfReplicaSpecs")
    }
    assert tfjob["spec"]["successPolicy"] in ("", "AllWorkers")
    assert tfjob["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert set(tfjob["spec"]["tfReplicaSpecs"]) == {"Worker"}
    worker = tfjob["spec"]["tfReplicaSpecs"]["Worker"]
    assert set(worker) == {"replicas", "restartPolicy", "template"}
    assert worker["restartPolicy"] == "ExitCode"
    assert "restartPolicy" not in worker["template"]["spec"]  # set by the operator
    pod = worker["template"]["spec"]
    [container] = pod["containers"]
    assert container["name"] == "tensorflow"
    assert {"name": "tfjob-port", "containerPort": 2222} in container["ports"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    arguments = container["args"]
    assert all(isinstance(word, str) for word in [*container["command"], *arguments])
    directory = arguments[arguments.index("--directory") + 1]
    assert any(directory.startswith(mount["mountPath"]) for mount in container["volumeMounts"])
    grace_s = float(arguments[arguments.index("--grace-secs") + 1])
    assert grace_s < pod["terminationGracePeriodSeconds"]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("signal_name", "codes"),
    [("TERM", {(0, 143), (1, 143)}), ("KILL", {(0, 201), (1, 137)})],
    ids=["SIGTERM", "SIGKILL"],
)
def test_kubernetes(
    signal_name: str,
    codes: set[tuple[int, int]],
    checksum: str,
    tfjob: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The kubelet stops a pod with SIGTERM, or SIGKILL: exit codes decide which pods restart.

    The job succeeds, bit-identical to an uninterrupted training.
    """
    operator = FakeOperator(tfjob, EXAMPLES, {"runs": tmp_path}, more=[])
    try:
        operator.pods[0].wait_for(IN_TRAINING, 300)
        os.kill(operator.pods[1].pid, signal.Signals[f"SIG{signal_name}"])
        outcome = operator.run(400)
    finally:
        operator.close()
    assert outcome == "Succeeded", "\n".join(operator.printed)
    assert codes <= set(operator.ended)
    assert {code for _, code in operator.ended} <= {0, 137, 143, 201}
    assert RESUMED in operator.printed[0]
    assert [CHECKSUM.findall(printed) for printed in operator.printed] == [[checksum]] * 2


@pytest.mark.cluster
def test_kubernetes_does_not_repeat_errors(tfjob: dict[str, Any], tmp_path: Path) -> None:
    """A worker with an invalid configuration exits with a code after which no pod restarts."""
    operator = FakeOperator(tfjob, EXAMPLES, {"runs": tmp_path}, more=["--grace-secs", "-1"])
    try:
        outcome = operator.run(200)
    finally:
        operator.close()
    assert outcome == "Failed"
    assert [code for _, code in operator.ended] == [93], operator.printed


def jobset(file: str) -> dict[str, Any]:
    """The JobSet of an example, or the one that Kubeflow Trainer derives from it."""
    if importlib.util.find_spec("yaml") is None:
        missing("PyYAML", HOW)
    text = (EXAMPLES / "kubernetes" / file).read_text()
    found = list(importlib.import_module("yaml").safe_load_all(text))
    return found[0] if len(found) == 1 else jobset_of(*found)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("file", "signal_name", "codes", "retries"),
    [
        ("trainjob.yaml", "TERM", {(0, 143), (1, 143)}, 0),
        ("jobset.yaml", "KILL", {(0, 201), (1, 137)}, 2),
    ],
)
def test_jobset(
    file: str,
    signal_name: str,
    codes: set[tuple[int, int]],
    retries: int,
    checksum: str,
    tmp_path: Path,
) -> None:
    """The same for a JobSet, whose pods restart with new addresses. A preemption costs no retry."""
    volumes = {"runs": tmp_path}
    with running(jobset(file), sys.executable, EXAMPLES, volumes, tmp_path, []) as job:
        job.pods[0].wait_for(IN_TRAINING, 300)
        os.kill(job.pods[1].pid, signal.Signals[f"SIG{signal_name}"])
        outcome = job.run(400)
    assert outcome == "Complete", "\n".join(job.printed)
    assert codes <= set(job.ended)
    assert job.retries >= retries, job.ended
    assert (job.retries > 0) == (retries > 0)
    assert RESUMED in job.printed[0]
    assert [CHECKSUM.findall(printed) for printed in job.printed] == [[checksum]] * 2


@pytest.mark.cluster
def test_jobset_does_not_repeat_errors(tmp_path: Path) -> None:
    volumes, more = {"runs": tmp_path}, ["--grace-secs", "-1"]
    manifest = jobset("jobset.yaml")
    with running(manifest, sys.executable, EXAMPLES, volumes, tmp_path, more) as job:
        assert job.run(200) == "Failed"
    assert [code for _, code in job.ended] == [93], job.printed
