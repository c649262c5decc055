"""A mock of Kubeflow's operator and a kubelet: the pods of a TFJob are local processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.cluster import environment, free_ports
from support.watched import Watched, first_to_end, until


class FakeOperator:
    """Runs the workers of a TFJob, and restarts them according to its restartPolicy.

    Every pod keeps its address, like its service. The image is this machine's Python; the test
    provides its working directory and volumes.

    Args:
        job: The TFJob, as parsed from YAML.
        working_folder: Working directory of the image.
        volumes: Folders by the names of the job's volumes.
        more: Additional arguments.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        working_folder: Path,
        volumes: Mapping[str, Path],
        more: list[str],
    ) -> None:
        self._workers = job["spec"]["tfReplicaSpecs"]["Worker"]
        [self._container] = self._workers["template"]["spec"]["containers"]
        self._working_folder = working_folder
        self._mounts = {
            mount["mountPath"]: str(volumes[mount["name"]])
            for mount in self._container["volumeMounts"]
        }
        self._more = more
        self._addresses = [f"127.0.0.1:{port}" for port in free_ports(self._workers["replicas"])]
        self.pods = [self._start(index) for index in range(len(self._addresses))]
        self.ended: list[tuple[int, int]] = []  # pod and exit code
        self.printed = ["" for _ in self.pods]

    def run(self, timeout_s: float) -> str:
        """Waits until the job is "Succeeded" (all workers) or "Failed"."""
        end_s = time.monotonic() + timeout_s
        done: set[int] = set()
        while len(done) < len(self.pods):
            running = [pod for index, pod in enumerate(self.pods) if index not in done]
            index = self.pods.index(first_to_end(running, until(end_s)))
            code = self.pods[index].code(until(end_s))
            self.ended.append((index, code))
            self.printed[index] += self.pods[index].output
            if code == 0:
                done.add(index)
            elif self._workers["restartPolicy"] == "ExitCode" and code >= 128:
                self.pods[index] = self._start(index)
            else:
                return "Failed"
        return "Succeeded"

    def close(self) -> None:
        for pod in self.pods:
            pod.kill()

    def _start(self, index: int) -> Watched:
        command = [*self._container["command"], *self._container["args"], *self._more]
        assert command[0] == "python"
        for inside, outside in self._mounts.items():
            command = [word.replace(inside, outside) for word in command]
        config = {
            "cluster": {"worker": self._addresses},
            "task": {"type": "worker", "index": index},
            "environment": "cloud",
        }
        env = environment({"TF_CONFIG": json.dumps(config)})
        return Watched([sys.executable, *command[1:]], env, self._working_folder)
