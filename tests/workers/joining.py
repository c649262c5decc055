"""Joins a cluster, with every worker in a different way, and builds a model.

    python joining.py HOW...

HOW, one per worker: `init` (`kd.init()`), `own` (the script creates the strategy), `early` (fails
before `kd.init()`) or `joined` (fails after it).
"""

from __future__ import annotations

import json
import os
import sys

import keras
import tensorflow as tf

import keras_distplug as kd

how = sys.argv[1 + json.loads(os.environ["TF_CONFIG"])["task"]["index"]]
if how == "early":
    raise ValueError("no data in <bucket>")
strategy = tf.distribute.MultiWorkerMirroredStrategy() if how == "own" else kd.init()
if how == "joined":
    raise ValueError("no data in <bucket>")
print("joined", flush=True)
with strategy.scope():
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
print("built", flush=True)
