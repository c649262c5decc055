"""Launchers that number processes, but do not publish their addresses."""

from __future__ import annotations

from collections.abc import Mapping

from keras_distplug.core.errors import ClusterError

_NUMBERED = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE"),
    "Kubeflow Trainer": ("PET_NODE_RANK", "PET_NNODES"),
    "Kubeflow Trainer's JAX runtime": ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
}


def require_none(environ: Mapping[str, str]) -> None:
    """Checks that no launcher has started this process as one of several.

    Raises:
        ClusterError: If one has: every process would train alone.
    """
    for launcher, (rank, size) in _NUMBERED.items():
        number, count = environ.get(rank, ""), environ.get(size, "")
        if number.isdecimal() and count.isdecimal() and int(count) > 1:
            raise ClusterError(
                f"This process is one of {count} ({rank}={number}, {size}={count}, as set by "
                f"{launcher}), but these variables do not contain the addresses of the others, so "
                "every process would train alone. Expected addresses from TF_CONFIG, Slurm, Vertex "
                "AI, SageMaker or KERAS_DISTPLUG_ADDRESS (Kubernetes). Start the "
                f"processes with `keras-distplug run --workers {count} -- python train.py` or "
                "`srun`, or set TF_CONFIG for each. If every process should train alone, set "
                "TF_CONFIG='{}' and give each its own directory."
            )
