"""A coverage-guided fuzzer for every kind of file that commands read.

    pip install atheris
    python tests/fuzz/guided.py KIND [--secs 600]

KIND is one of manifest, record, model, shard, log, incident. A correct digest is written into every
mutated file that has one, so that later checks are reached as well. Any error other than ours stops
it with a traceback; so does an input that takes more than 10 seconds or 1 GB.

"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import atheris  # noqa: E402 (after the path to the package)

with atheris.instrument_imports(include=["keras_distplug", "json"]):
    from commands import made
    from fsspec.implementations.memory import MemoryFileSystem
    from fuzz import test_forged_checkpoints, test_forged_logs
    from fuzz.mutations import places_in
    from storage.checkpoints import RUN

    from keras_distplug.commands import tables
    from keras_distplug.commands.ls import as_json
    from keras_distplug.core.errors import DistplugError
    from keras_distplug.nonfinite import incident_files
    from keras_distplug.runlog import goodput_totals
    from keras_distplug.runlog.log_files import Reader
    from keras_distplug.runlog.summary import summary
    from keras_distplug.storage import architecture, layout, runs, survey
    from keras_distplug.storage.files import Files, open_files
    from keras_distplug.storage.sealed import compute_digest
    from keras_distplug.storage.store import CheckpointStore

SHARD = test_forged_checkpoints.SHARD


def sealed(data: bytes) -> bytes:
    """Returns the file with a correct digest, if it is a JSON object."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(body, dict):
        return data
    body.pop("sha256", None)
    return json.dumps({**body, "sha256": compute_digest(body)}).encode()


def fresh(path: str, data: bytes) -> Files:
    MemoryFileSystem.store.clear()
    files = open_files(f"memory://{uuid.uuid4().hex}")
    files.create(path, [data])
    return files


def manifest(data: bytes) -> None:
    files = fresh(f"{RUN}/step-00000042/{layout.MANIFEST}", sealed(data))
    [seen] = survey.list_checkpoints(files, RUN)
    if seen.manifest is not None:
        tables._plain(as_json(seen))
        tables.numbers(seen.manifest.metrics)
        CheckpointStore(files, RUN)._retention_entry(seen.place)


def record(data: bytes) -> None:
    runs.read_run(fresh(f"{RUN}/{layout.RECORD}", sealed(data)), RUN)


def model(data: bytes) -> None:
    files = fresh(f"{RUN}/MODEL.json", sealed(data))
    architecture.recall(files, RUN, 1)


def shard(data: bytes) -> None:
    body = json.loads(json.dumps(test_forged_checkpoints.BODY))
    digest = test_forged_checkpoints.xxhash.xxh3_128(data).hexdigest()
    body["shards"][0] |= {"bytes": len(data), "xxh3_128": digest}
    test_forged_checkpoints.read_all(body, data)


def log(data: bytes) -> None:
    files = fresh("run-0001/log/a-worker-0.jsonl", data)
    files.create("run-0001/log/supervisor-a.jsonl", [data])
    fits, supervised = Reader(files, "run-0001", lambda told: None).read()
    json.dumps(summary("run-0001", fits, supervised, 2000.0), allow_nan=False)
    goodput_totals.attempts(fits, supervised)


def incident(data: bytes) -> None:
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError, AttributeError):
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        metadata = header["__metadata__"]
        metadata.pop("sha256", None)
        metadata["sha256"] = incident_files._digest(header, [data[begin:]])
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[begin:]
    name = "20250101T000000Z-epoch-1-batch-2-replica-0.safetensors"
    incident_files.read(fresh(f"{incident_files.FOLDER}/{name}", data), name)


VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**18, 10**400, 1e308, math.nan, math.inf),
    *("", "x", "/etc/passwd", "\ud800", "\x1b[31m", "float32", "object", "9999-99-99T00:00:00"),
    *([], {}, [[]], {"a": [1]}, [math.nan], [None, None]),
)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Changes a value in one of the JSON objects of a file, otherwise any bytes."""
    chance = random.Random(seed)
    lines = data.split(b"\n")
    number = chance.randrange(len(lines))
    head, text, tail = _json_in(lines[number])
    try:
        holder = [json.loads(text)]
    except (ValueError, RecursionError):
        holder = []
    if not holder or chance.random() < 0.3:
        return bytes(atheris.Mutate(data, max_size))
    way = chance.choice(list(places_in(holder))[1:])
    parent: Any = holder
    for key in way[:-1]:
        parent = parent[key]
    inner = parent[way[-1]]
    if isinstance(inner, str) and chance.random() < 0.5:
        with contextlib.suppress(ValueError):  # JSON in a string, as in the files of incidents
            parent[way[-1]] = mutate(inner.encode(), max_size, seed + 1).decode()
            inner = None
    if inner is not None or chance.random() < 0.1:
        parent[way[-1]] = chance.choice(VALUES)
    if isinstance(parent, dict) and chance.random() < 0.1:
        del parent[way[-1]]
    text = json.dumps(holder[0] if holder else None).encode()
    lines[number] = (len(text).to_bytes(8, "little") if head else b"") + text + tail
    return b"\n".join(lines)[:max_size]


def _json_in(line: bytes) -> tuple[bytes, bytes, bytes]:
    """Splits a line into the length at the start of a safetensors file, the JSON, and the rest."""
    end = 8 + int.from_bytes(line[:8], "little")
    if line[8:9] == b"{" and end <= len(line):
        return line[:8], line[8:end], line[end:]
    return b"", line, b""


def seeds(kind: str) -> list[bytes]:
    """Returns valid files."""
    if kind == "shard":
        return [SHARD]
    if kind == "log":
        said = test_forged_logs.said
        lines = said(test_forged_logs.OF_WORKER, "w") + said(test_forged_logs.OF_SUPERVISOR, "s")
        return [b"".join(json.dumps(line).encode() + b"\n" for line in lines)]
    if kind == "incident":
        given = incident_files.Incident("run-0001", 0, 1, 0, "told", "2025-01-01T00:00:00+00:00")
        batch = (made.state(4).arrays["model/dense/kernel"], None)
        return [b"".join(incident_files.encode(given, batch))]
    if kind == "model":
        return [json.dumps({"model": {"class_name": "Sequential"}, "from_step": 0}).encode()]
    files = open_files(f"memory://{uuid.uuid4().hex}")
    made.run(files, made.state(4))
    name = layout.RECORD if kind == "record" else f"step-00000004/{layout.MANIFEST}"
    return [files.read(f"{RUN}/{name}")]


TARGETS: dict[str, Callable[[bytes], Any]] = {
    **{"manifest": manifest, "record": record, "model": model},
    **{"shard": shard, "log": log, "incident": incident},
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kind", choices=TARGETS)
    options.add_argument("--secs", type=int, default=600)
    given = options.parse_args()

    def tried(data: bytes) -> None:
        with contextlib.suppress(DistplugError), contextlib.redirect_stdout(io.StringIO()):
            TARGETS[given.kind](data)

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds(given.kind)):
            tried(seed)
            Path(corpus, str(number)).write_bytes(seed)
        limits = [f"-max_total_time={given.secs}", "-timeout=10", "-rss_limit_mb=1024"]
        arguments = [sys.argv[0], *limits, "-max_len=8192", corpus]
        atheris.Setup(arguments, tried, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
