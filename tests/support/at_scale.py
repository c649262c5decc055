"""Operations of many workers together, in a simulation.

Every function is an operation of any number of workers, run with the package's own code.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
from support.simulated import Bucket, Clock, Costs, FilesOfWorker, Service, StoreCosts, simulation

from keras_distplug.checkpoint.candidates import Candidates
from keras_distplug.cluster.channel import Channel
from keras_distplug.cluster.listeners import Mailbox, Reports
from keras_distplug.cluster.roles import Role
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.preemption.stopping import Cause, CollectiveStop
from keras_distplug.step.step_reports import ReplicaReport, StepReport, as_text
from keras_distplug.storage import commit, runs
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.layout import MANIFEST
from keras_distplug.storage.manifest import Manifest, Shard, VariableSpec
from keras_distplug.storage.retention import Retention
from keras_distplug.storage.store import CheckpointStore

STATE_BYTES, VARIABLES, METRICS = 2**30, 64, 4
_STAND_FOR = 256  # bytes of the state, for every byte stored
_PLAN = json.dumps({"failed": None, "plan": {"save": True, "next_look": 100}})


@dataclass(frozen=True)
class Cost:
    """The cost of an operation.

    Args:
        operation: Name of the operation.
        workers: Number of workers that took part.
        messages: Messages to the coordination service, by kind.
        service_bytes: Bytes to and from the service.
        requests: Requests to the store, by kind.
        store_bytes: Bytes to and from the store, of all workers.
        seconds: Time until the last worker was done.
        training_s: Part of this time during which training waited, in seconds.
        kept: Messages that the service still stores, beyond one per worker.
    """

    operation: str
    workers: int
    messages: dict[str, int]
    service_bytes: int
    requests: dict[str, int]
    store_bytes: int
    seconds: float
    training_s: float
    kept: int


class Cluster:
    """Workers, as if every one were a separate process."""

    def __init__(self, clock: Clock, count: int, costs: Costs, store_costs: StoreCosts) -> None:
        addresses = {"worker": tuple(f"host-{rank}:1" for rank in range(count))}
        self.clock = clock
        self.roles = [Role("worker", rank, addresses, "a simulation") for rank in range(count)]
        self.service = Service(clock, count, costs)
        self.bucket = Bucket(clock, store_costs, _STAND_FOR, {MANIFEST: manifest_bytes(count)})
        self.agreements = [Channel(role, self.service) for role in self.roles]

    def all_do(self, act: Callable[[int], object]) -> float:
        """Runs an action on all workers. Returns its duration."""
        for rank in range(len(self.roles)):
            self.clock.start(rank, lambda rank=rank: act(rank))  # type: ignore[misc]
        return self.clock.run()

    def cost(self, operation: str, seconds: float, training_s: float) -> Cost:
        """Returns the cost since the traffic was last reset."""
        said, moved = self.service.traffic, self.bucket.traffic
        return Cost(
            operation,
            len(self.roles),
            dict(said.messages),
            said.bytes,
            dict(moved.messages),
            moved.bytes,
            seconds,
            training_s,
            len(self.service.values),
        )

    def reset_counts(self) -> None:
        self.service.traffic.__init__()  # type: ignore[misc]
        self.bucket.traffic.__init__()  # type: ignore[misc]


@contextmanager
def cluster(
    count: int, costs: Costs | None = None, store_costs: StoreCosts | None = None
) -> Iterator[Cluster]:
    with simulation() as clock:
        yield Cluster(clock, count, costs or Costs(), store_costs or StoreCosts())


# Agreements


def one_to_all(of: Cluster) -> Cost:
    """One worker sends to all, as in every check if a checkpoint is due."""
    seconds = of.all_do(lambda rank: of.agreements[rank].broadcast("save", None if rank else _PLAN))
    return of.cost("the chief sends to all", seconds, seconds)


def all_to_all(of: Cluster) -> Cost:
    """All workers send to all, as for local checkpoints, or `ReplicaMetrics(logs=...)`."""
    seconds = of.all_do(lambda rank: of.agreements[rank].gather("local", "x" * 100))
    return of.cost("all send 100 bytes to all", seconds, seconds)


def first_error(of: Cluster) -> Cost:
    """All workers agree that none has an error, as after reading a checkpoint."""
    seconds = of.all_do(lambda rank: of.agreements[rank].first_error("restored", None))
    return of.cost("first error", seconds, seconds)


def barrier(of: Cluster) -> Cost:
    seconds = of.all_do(lambda rank: of.agreements[rank].barrier("finished"))
    return of.cost("barrier", seconds, seconds)


def stop(of: Cluster) -> Cost:
    """A scheduler preempts all workers at the same time."""
    agreed_s = []
    stops = []

    def watch(rank: int) -> None:
        stops.append(CollectiveStop(of.agreements[rank].below("a session"), print))

    of.all_do(watch)
    of.reset_counts()  # of one open request per worker, pending since the start of training
    started_s = of.clock.now_s

    def preempt(rank: int) -> None:
        stops[rank].request(Cause("SIGTERM", of.roles[rank].name, 0.0))

    def agree(each: CollectiveStop, text: str) -> None:
        stock(each, text)
        agreed_s.append(of.clock.now_s - started_s)

    stock = CollectiveStop._agree
    for each in stops:
        mailbox: Mailbox = each._mailbox
        mailbox._on_letter = lambda text, each=each: agree(each, text)  # type: ignore[misc]
    of.all_do(preempt)
    assert len({each._stop_at for each in stops}) == 1
    assert all(each._cause is not None for each in stops)
    return of.cost("all are preempted", max(agreed_s), max(agreed_s))


# Statistics


def statistics(of: Cluster) -> Cost:
    """The reports of a window of steps, in the background of the training thread."""
    together: list[list[str]] = []

    def report(rank: int) -> None:
        each = Reports(of.agreements[rank].below("a session"), together.append, print)
        each.send(lambda: as_text(step_report(rank)))
        each.close(3600.0)

    seconds = of.all_do(report)
    assert len(together[0]) == len(of.roles)
    return of.cost("statistics of a window", seconds, 0.0)


def step_report(rank: int) -> StepReport:
    replica = ReplicaReport(rank, 0.123456789, 0.012345678, 32.0, 1.2345678, 2.3456789)
    where = f"worker-{rank} on host-{rank}"
    return StepReport(
        rank, where, 1000, 20, 0.1234, (replica,), 0.0012345, 2**31, 0.00123, True, 0.123, 0.456
    )


# Checkpoints


def state(count: int) -> TrainState:
    """A state of 1 GiB, in which every byte stands for many.

    Replica-specific state is omitted, because all workers would read all of it.
    """
    values = np.random.default_rng(0).bytes(STATE_BYTES // _STAND_FOR // VARIABLES)
    arrays = {f"model/{n:03}": np.frombuffer(values, np.uint8) for n in range(VARIABLES)}
    return TrainState(Cursor(epoch=0, batch=count, step=count), arrays)


def random_message() -> str:
    """A message as long as `training.random_states` of Python's and NumPy's generators."""
    words = base64.b64encode(np.array(random.Random(0).getstate()[1], np.uint32).tobytes()).decode()
    return json.dumps({"python": [3, words, None], "numpy": ["MT19937", words, 624, 0, 0.0]})


def own_message() -> str:
    """A message as long as `training.own_states` of a replica's metrics."""
    return base64.b64encode(bytes(4 * METRICS)).decode()


@contextmanager
def _scaled() -> Iterator[None]:
    traits = FilesOfWorker.traits
    small = type(traits)(traits.file_bytes // _STAND_FOR, traits.at_once, traits.is_near)
    with (
        mock.patch.object(FilesOfWorker, "traits", small),
        mock.patch.object(commit, "_SHARE_BYTES", commit._SHARE_BYTES // _STAND_FOR),
    ):
        yield


def saved(of: Cluster) -> Cost:
    """The second checkpoint of a run that keeps one: the previous one is deleted."""
    files = [of.bucket.seen_by_worker() for _ in of.roles]
    of.all_do(lambda rank: rank or runs.create_run(files[0], job=None, seed=0))
    writers = [
        Writer(
            files[rank],
            CheckpointStore(files[rank], "run-0001", Retention(keep_last=1)),
            Team(rank, len(of.roles), of.agreements[rank], timeout_s=86400.0),
        )
        for rank in range(len(of.roles))
    ]
    trained_s = []

    def save(rank: int, number: int, taken: TrainState) -> None:
        started_s = of.clock.now_s
        each = of.agreements[rank]
        each.broadcast("save", None if rank else _PLAN)
        each.gather("own states", own_message())
        each.gather_on_chief("random", random_message())
        trained_s.append(of.clock.now_s - started_s)
        writers[rank].save(taken, f"attempt-{number}")

    with _scaled():
        for number in (1, 2):
            of.reset_counts()
            trained_s.clear()
            taken = state(number)
            seconds = of.all_do(lambda rank: save(rank, number, taken))  # noqa: B023
    return of.cost("save of 1 GiB", seconds, max(trained_s))


def restored(of: Cluster) -> Cost:
    """Restored by as many restarted workers as have written it. Called after `saved`."""
    of.reset_counts()
    sizes: set[int] = set()

    def restore(rank: int) -> None:
        files, each = of.bucket.seen_by_worker(), of.agreements[rank]
        name = None if rank else runs.newest_name(files)
        run = runs.read_run(files, each.broadcast("run", name))
        store = CheckpointStore(files, run.name)
        found = Candidates(store, None, each, is_chief=rank == 0, epochs=1).newest()
        assert found is not None
        sizes.add(sum(value.nbytes for _, value in found.stored.values()))
        each.first_error("restored", None)

    with _scaled():
        seconds = of.all_do(restore)
    assert sizes == {STATE_BYTES // _STAND_FOR}
    return of.cost("restore of 1 GiB", seconds, seconds)


OPERATIONS = (one_to_all, first_error, all_to_all, barrier, stop, statistics)


def all_costs(
    count: int, costs: Costs | None = None, store_costs: StoreCosts | None = None
) -> Iterator[Cost]:
    """Runs every operation in its own simulation, except the restore, which follows the save."""
    for operation in OPERATIONS:
        with cluster(count, costs, store_costs) as made:
            yield operation(made)
    with cluster(count, costs, store_costs) as made:
        yield saved(made)
        yield restored(made)


# Manifests


def manifest_bytes(count: int) -> int:
    """Returns the size of a manifest of this many workers, with one replica each, mid-epoch."""
    return sum(manifest_parts(count).values())


def manifest_parts(count: int) -> dict[str, int]:
    """Returns the growing parts of the manifest and their causes, per two additional workers."""
    few = _manifest(2, 2)
    parts = {
        "random": _manifest(4, 2) - few,
        "replicas": _manifest(2, 2, replicas=4) - few,
        "shards": _manifest(2, 4) - few,
    }
    writers = commit._writers(STATE_BYTES, count)
    grown = {"random": count, "replicas": count, "shards": writers}
    found = {name: size * (grown[name] - 2) // 2 for name, size in parts.items()}
    return {**found, "rest": few}


def _manifest(workers: int, shards: int, replicas: int = 2) -> int:
    specs = [VariableSpec(f"model/layer_{n}/kernel", (1024, 4096), "float32") for n in range(64)]
    specs += [
        VariableSpec(f"replicas/{r:04}/{n:03}/accuracy/total", (), "float32")
        for r in range(replicas)
        for n in range(METRICS)
    ]
    return len(
        Manifest(
            Cursor(epoch=0, batch=1, step=1),
            tuple(specs),
            tuple(
                Shard(f"{'a' * 32}-1/rank-{n:04}-1.safetensors", 10**7, "0f" * 16)
                for n in range(shards)
            ),
            workers,
            "a" * 32 + "-1",
            "2026-11-24T00:00:00+00:00",
            random=tuple(json.loads(random_message()) for _ in range(workers)),
        ).to_json()
    )
