"""Trains `samples.py` in Ray Train on several nodes, one of which is removed and one added.

    python ray_nodes.py FOLDER replaced|elastic

replaced: two workers; a node is removed mid-epoch, and another one replaces it. elastic: one or two
workers; a node is removed mid-epoch, and one is added in a later epoch.
"""

from __future__ import annotations

import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

SAMPLES = Path(__file__).parent / "samples.py"
KILLS = {"replaced": ("1:1:3",), "elastic": ("1:1:3", "0:2:3")}
TIMEOUT_S = 200


def train(config: dict[str, Any]) -> None:
    with mock.patch("sys.argv", ["samples.py", *config["arguments"]]):
        # Waits until it is killed with its node, or by Ray.
        runpy.run_path(config["script"], {"end": Event().wait})


def await_kills(folder: Path, count: int) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not (folder / "kills").exists() or (folder / "kills").read_text().count("\n") < count:
        assert time.monotonic() < end_s, f"attempt {count} has not exited"
        time.sleep(0.05)


def change_nodes(cluster: Cluster, nodes: list[Any], folder: Path, kind: str) -> None:
    await_kills(folder, 1)
    cluster.remove_node(nodes[1], allow_graceful=False)
    if kind == "elastic":
        await_kills(folder, 2)
    cluster.add_node(num_cpus=1)


def main(folder: Path, kind: str) -> None:
    # The first node, which cannot be removed, runs no worker.
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=cluster.address)
        trainer = TensorflowTrainer(
            train,
            train_loop_config={
                "script": str(SAMPLES),
                "arguments": [str(folder), "tf.data", *KILLS[kind]],
            },
            scaling_config=ScalingConfig(
                num_workers=(1, 2) if kind == "elastic" else 2,
                elastic_resize_monitor_interval_s=1,
            ),
            run_config=RunConfig(
                storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=5)
            ),
        )
        # A node can only be added in the main thread, because of its signal handlers.
        with ThreadPoolExecutor(1) as pool:
            trained = pool.submit(trainer.fit)
            change_nodes(cluster, nodes, folder, kind)
            trained.result()
        ray.shutdown()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
