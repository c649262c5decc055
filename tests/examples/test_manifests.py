"""The manifests for Kubernetes match the schemas of their resources, and our environment."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from support.cluster import ROOT
from support.needed import missing
from support.schemas import schema_of

from keras_distplug.cluster.roles import from_environment
from keras_distplug.core.exit_codes import ExitCode

pytestmark = [pytest.mark.ci, pytest.mark.timeout(60)]  # needs additional packages

FOLDER = ROOT / "examples" / "kubernetes"
Resource = dict[str, Any]


def resources() -> dict[str, Resource]:
    """Returns the objects by kind."""
    for package in ("yaml", "jsonschema"):
        if importlib.util.find_spec(package) is None:
            missing(package, "Run pip install '.[test-schedulers]'.")
    yaml = importlib.import_module("yaml")
    return {
        each["kind"]: each
        for path in sorted(FOLDER.glob("*.yaml"))
        for each in yaml.safe_load_all(path.read_text())
    }


KINDS = ("ClusterTrainingRuntime", "JobSet", "TFJob", "TrainJob")


def complaints(resource: Resource) -> list[str]:
    """Returns the schema's complaints about it."""
    validator = importlib.import_module("jsonschema").Draft202012Validator
    schema = schema_of(resource["kind"], resource["apiVersion"].partition("/")[2])
    return [
        f"{error.json_path}: {error.message}" for error in validator(schema).iter_errors(resource)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_valid(kind: str) -> None:
    assert sorted(resources()) == sorted(KINDS)
    assert complaints(resources()[kind]) == []


def of_job(jobset: Resource) -> Resource:
    return jobset["replicatedJobs"][0]["template"]["spec"]


def misspell(found: dict[str, Resource]) -> Resource:
    job = of_job(found["JobSet"]["spec"])
    job["completionsMode"] = job.pop("completionMode")
    return found["JobSet"]


def give_a_text(found: dict[str, Resource]) -> Resource:
    found["TrainJob"]["spec"]["trainer"]["numNodes"] = "two"
    return found["TrainJob"]


def rename_a_field(found: dict[str, Resource]) -> Resource:
    job = of_job(found["ClusterTrainingRuntime"]["spec"]["template"]["spec"])
    container = job["template"]["spec"]["containers"][0]
    container["environment"] = container.pop("env")
    return found["ClusterTrainingRuntime"]


def leave_out(found: dict[str, Resource]) -> Resource:
    del found["TFJob"]["spec"]["tfReplicaSpecs"]
    return found["TFJob"]


@pytest.mark.parametrize("harm", [misspell, give_a_text, rename_a_field, leave_out])
def test_invalid(harm: Callable[[dict[str, Resource]], Resource]) -> None:
    """A mistake in a manifest is detected."""
    assert complaints(harm(copy.deepcopy(resources())))


def test_jobset() -> None:
    """The JobSet's pods find each other, and their grace period is longer than the script's."""
    found = resources()["JobSet"]
    [replicated] = found["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completions"] == job["parallelism"]
    [container] = job["template"]["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container["env"]}
    names = [
        f"{found['metadata']['name']}-{replicated['name']}-0-{index}.{found['metadata']['name']}"
        for index in range(job["completions"])
    ]
    for index in range(job["completions"]):
        role = from_environment(environ | {"JOB_COMPLETION_INDEX": str(index)})
        assert role.index == index
        assert role.cluster["worker"] == tuple(f"{name}:2222" for name in names)
    require_codes(job, container["name"])
    require_time(job, container["args"])


def test_trainjob() -> None:
    """The same holds for a TrainJob, whose runtime knows neither its name nor its number of
    nodes."""
    found = resources()
    runtime, job = found["ClusterTrainingRuntime"], found["TrainJob"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "jax" in runtime["spec"]["mlPolicy"]  # sets JAX_NUM_PROCESSES
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]
    [container] = pods["template"]["spec"]["containers"]
    assert replicated["name"] == container["name"] == "node"  # the names that Trainer expects
    environ = {each["name"]: each.get("value", "digits") for each in container["env"]}
    address = environ.pop("KERAS_DISTPLUG_ADDRESS").replace("$(JOBSET)", environ["JOBSET"])
    nodes = str(job["spec"]["trainer"]["numNodes"])
    of_pod = {"JAX_NUM_PROCESSES": nodes, "JOB_COMPLETION_INDEX": "1"}
    role = from_environment({"KERAS_DISTPLUG_ADDRESS": address} | of_pod)
    assert role.cluster["worker"] == ("digits-node-0-0.digits:2222", "digits-node-0-1.digits:2222")
    require_codes(pods, "node")
    require_time(pods, job["spec"]["trainer"]["args"])


def require_codes(job: Resource, container: str) -> None:
    """A permanent failure ends the job, and preemption does not use up retries."""
    by_code = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert by_code == {
        1: "FailJob",
        ExitCode.DO_NOT_RESTART: "FailJob",
        ExitCode.PREEMPTED: "Ignore",
    }
    for rule in job["podFailurePolicy"]["rules"]:
        assert rule.get("onExitCodes", {}).get("containerName", container) == container
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["backoffLimit"] > 0


def require_time(job: Resource, arguments: list[str]) -> None:
    grace_s = float(arguments[arguments.index("--grace-secs") + 1])
    assert grace_s < job["template"]["spec"]["terminationGracePeriodSeconds"]
