"""Trains like a worker of `examples/ray_train.py`, without Ray: of_ray.py FOLDER"""

from __future__ import annotations

import json
import os
import sys
from unittest import mock

from support.cluster import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import ray_train

context = mock.Mock()
context.get_world_rank.return_value = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
with mock.patch("ray.train.get_context", return_value=context):
    ray_train.train({"directory": sys.argv[1], "kill": None})
