"""A mock of Kubernetes' Job controller, of a kubelet, and of the host names of a JobSet.

Every pod is a process in a network namespace with its own address; its replacement has another one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.cluster import environment
from support.networks import Machine, hosts
from support.watched import Watched, first_to_end, until

_MACHINES = 8


class IndexedJob:
    """Runs the pods of a JobSet's only Job, and replaces them according to its podFailurePolicy.

    Args:
        jobset: The JobSet, as parsed from YAML.
        python: Interpreter for `python` in the image.
        working_folder: Working directory of the image.
        volumes: Folders by the names of the pods' volumes.
        more: Additional arguments of the container.
        machines: One machine per pod.
        folder: Folder for files that the pods share.
    """

    def __init__(
        self,
        jobset: Mapping[str, Any],
        python: str,
        working_folder: Path,
        volumes: Mapping[str, Path],
        more: list[str],
        machines: list[Machine],
        folder: Path,
    ) -> None:
        [replicated] = jobset["spec"]["replicatedJobs"]
        self._name = f"{jobset['metadata']['name']}-{replicated['name']}-0"
        self._domain = jobset["metadata"]["name"]
        self._job = replicated["template"]["spec"]
        [self._container] = self._job["template"]["spec"]["containers"]
        self._python, self._working_folder, self._more = python, working_folder, more
        self._mounts = {
            mount["mountPath"]: str(volumes[mount["name"]])
            for mount in self._container["volumeMounts"]
        }
        self._free = list(machines)
        self._hosts = folder / "hosts"
        self._addresses: dict[int, str] = {}
        self.ended: list[tuple[int, int]] = []  # pod and exit code
        self.retries = 0
        self.printed = ["" for _ in range(self._job["completions"])]
        self.pods = [self._start(index) for index in range(self._job["completions"])]

    def run(self, timeout_s: float) -> str:
        """Waits until the Job is "Complete" or "Failed"."""
        end_s = time.monotonic() + timeout_s
        done: set[int] = set()
        while len(done) < len(self.pods):
            running = [pod for index, pod in enumerate(self.pods) if index not in done]
            index = self.pods.index(first_to_end(running, until(end_s)))
            code = self.pods[index].code(until(end_s))
            self.ended.append((index, code))
            self.printed[index] += self.pods[index].output
            action = self._action(code)
            if code == 0:
                done.add(index)
                continue
            self.retries += action == "Count"
            if action == "FailJob" or self.retries > self._job["backoffLimit"]:
                return "Failed"
            self.pods[index] = self._start(index)
        return "Complete"

    def close(self) -> None:
        for pod in self.pods:
            pod.kill()

    def _action(self, code: int) -> str:
        for rule in self._job["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes is not None and codes["operator"] == "In" and code in codes["values"]:
                return str(rule["action"])
        return "Count"

    def _start(self, index: int) -> Watched:
        machine = self._free.pop(0)
        self._addresses[index] = machine.address
        names = [
            f"{address} {self._name}-{number}.{self._domain}"
            for number, address in sorted(self._addresses.items())
        ]
        # In place, because it is bind-mounted into running processes.
        self._hosts.write_text("127.0.0.1 localhost\n" + "\n".join(names) + "\n")
        command = [*self._container["command"], *self._container["args"], *self._more]
        assert command[0] == "python"
        for inside, outside in self._mounts.items():
            command = [word.replace(inside, outside) for word in command]
        own = {each["name"]: each["value"] for each in self._container["env"]}
        env = environment(own | {"JOB_COMPLETION_INDEX": str(index)})
        enter = [
            *("nsenter", f"--net=/run/netns/{machine.prefix[-1]}", "unshare", "--mount"),
            *("bash", "-c", f"mount --bind '{self._hosts}' /etc/hosts && exec \"$@\"", "_"),
        ]
        return Watched([*enter, self._python, *command[1:]], env, self._working_folder)


def jobset_of(runtime: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JobSet that Kubeflow Trainer v2.3 creates from a TrainJob and its runtime."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    [replicated] = spec["replicatedJobs"]
    pods = replicated["template"]["spec"]
    pods |= {"completions": trainer["numNodes"], "parallelism": trainer["numNodes"]}
    [container] = pods["template"]["spec"]["containers"]
    container |= {"command": trainer["command"], "args": trainer["args"]}
    # The kubelet reads labels first, and then substitutes $(...).
    known = {each["name"]: name for each in container["env"] if "valueFrom" in each}
    for each in container["env"]:
        value = name if each.pop("valueFrom", None) else each["value"]
        for variable, text in known.items():
            value = value.replace(f"$({variable})", text)
        each["value"] = value
    container["env"].append({"name": "JAX_NUM_PROCESSES", "value": str(trainer["numNodes"])})
    return {"metadata": {"name": name}, "spec": spec}


@contextmanager
def running(
    jobset: Mapping[str, Any],
    python: str,
    working_folder: Path,
    volumes: Mapping[str, Path],
    folder: Path,
    more: list[str],
) -> Iterator[IndexedJob]:
    with hosts(_MACHINES) as machines:
        job = IndexedJob(jobset, python, working_folder, volumes, more, machines, folder)
        try:
            yield job
        finally:
            job.close()
