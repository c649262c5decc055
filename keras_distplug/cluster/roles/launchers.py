"""Launchers that number processes, but do not say where the others are."""

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
        ClusterError: If one has: each would train alone.
    """
    for launcher, (rank, size) in _NUMBERED.items():
        number, count = environ.get(rank, ""), environ.get(size, "")
        if number.isdecimal() and count.isdecimal() and int(count) > 1:
            raise ClusterError(
                f"This process is one of {count} ({rank}={number}, {size}={count}, as set by "
                f"{launcher}), but these variables do not say where the others listen, so each "
                "would train alone. Expected: TF_CONFIG, Slurm, Vertex AI, SageMaker or "
                "KERAS_DISTPLUG_ADDRESS (Kubernetes). Start the "
                f"processes with `keras-distplug run --workers {count} -- python train.py` or "
                "`srun`, or set TF_CONFIG for each. If each is to train alone, set TF_CONFIG='{}' "
                "and give each a directory of its own."
            )
