"""A script that `recovery.py` runs under `keras-distplug run`: FOLDER WORKER EVERY FAULT ..."""

from __future__ import annotations

import sys
from pathlib import Path

from events import SAVE_EVERY, SAVE_SECS, STEP_SECS, Events

folder, hit, every, faults = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
events = Events(folder)

import tensorflow as tf  # noqa: E402
from recovering import Batches, Harm, build  # noqa: E402

import keras_distplug as kd  # noqa: E402

strategy = kd.init()


def lone_collective() -> None:
    """Calls a collective that the other workers do not call. It uses a separate key: with the next
    key of `strategy`, TensorFlow would pair it with their next collective and raise an error in
    both, instead of hanging."""
    size = strategy.num_replicas_in_sync
    tf.raw_ops.CollectiveReduceV2(
        input=tf.ones(()),
        group_size=size,
        group_key=10**6,
        instance_key=10**6,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
    )


harm = Harm(events, hit, every, faults, lone_collective)
kd.distributed_fit(
    build(),
    Batches(harm),
    epochs=every * len(faults) + 1,
    shuffle=False,
    verbose=0,
    callbacks=[
        harm,
        kd.BackupAndRestore(folder / "run", save_freq=SAVE_EVERY),
        kd.PreemptionHandler(cloud=False),
        kd.HangWatchdog(step_secs=STEP_SECS, save_secs=SAVE_SECS),
    ],
)
