"""A worker of `benchmarks/scale.py --measure`: `service.py FILE`. It measures TensorFlow's
coordination service from a worker that does not host it."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras_distplug as kd
from keras_distplug.backend.tensorflow.runtime.context import ServiceKeyValues
from keras_distplug.cluster import agreement

TIMES, THREADS, LARGE_BYTES = 1000, 16, 2**23

strategy = kd.init()
role = agreement.get_role(strategy)
workers = agreement.get_channel(role)
service = ServiceKeyValues()


def median_s(act: Callable[[int], object], times: int = TIMES) -> float:
    taken = []
    for number in range(times):
        start_s = time.perf_counter()
        act(number)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken)


workers.barrier("all are there")
if not role.is_chief:
    told = {
        "put_s": median_s(lambda n: service.put(f"measured/{n}", "x" * 200)),
        "get_s": median_s(lambda n: service.get(f"measured/{n}", 60)),
    }
    start_s = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda n: service.get(f"measured/{n % TIMES}", 60), range(8 * TIMES)))
    told["get_in_turn_s"] = (time.perf_counter() - start_s) / (8 * TIMES)
    service.put("large", "x" * LARGE_BYTES)
    told["bytes_per_s"] = LARGE_BYTES / median_s(lambda n: service.get("large", 60), 20)
    start_s = time.perf_counter()
    service.delete("measured")  # including everything below it
    told["delete_of_1000_s"] = time.perf_counter() - start_s
    assert service.put_first("measured/0", "anew"), "files below it were not deleted"
    Path(sys.argv[1]).write_text(json.dumps(told))
workers.barrier("measured")
os._exit(0)  # TensorFlow's shutdown may take long
