"""Thousands of workers in one process, which run the package's own code in simulated time.

Every worker is a thread, and only one of them runs at a time: the one with the earliest time.
Requests to the coordination service and to the store take modeled time, and are counted.
Computation takes no time.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from keras_distplug.cluster import channel, listeners
from keras_distplug.storage import store as checkpoint_store
from keras_distplug.storage.files import Traits

_STACK_BYTES = 2**19
_FEW_BYTES = 1024


class _Over(BaseException):
    """Ends the thread of a process that is no longer needed."""


def _closed() -> threading.Lock:
    """A lock for a single wait that another thread ends: faster than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Process:
    """A worker, or a thread of it, with the interface of `threading.Thread`."""

    def __init__(self, clock: Clock, worker: int, act: Callable[[], object]) -> None:
        self._clock = clock
        self.worker = worker
        self.act = act
        self.turn = _closed()
        self.ticket = 0  # the event that it waits for
        self.is_over = False
        self.joined_by: list[Process] = []

    def join(self, timeout: float | None = None) -> None:
        if not self.is_over:
            self.joined_by.append(self._clock.running)
            self._clock.park(timeout)

    def is_alive(self) -> bool:
        return not self.is_over


class Clock:
    """The clock of a simulation. Only the running process may call its methods, except `run`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._next: list[tuple[float, int, int, Process]] = []
        self._order = itertools.count()
        self._running: Process | None = None
        self._all: list[Process] = []
        self._done = _closed()
        self._error: BaseException | None = None
        self._is_over = False

    @property
    def running(self) -> Process:
        assert self._running is not None
        return self._running

    def start(self, worker: int, act: Callable[[], object]) -> Process:
        process = Process(self, worker, act)
        self._all.append(process)
        threading.Thread(target=self._live, args=(process,), daemon=True).start()
        self._wake_at(self.now_s, process)
        return process

    def run(self) -> float:
        """Runs all processes until none can continue. Returns the elapsed time."""
        started_s = self.now_s
        self._hand_over()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self.now_s - started_s

    def end(self) -> None:
        """Ends processes that still wait."""
        self._is_over = True
        for each in self._all:
            if not each.is_over:
                each.turn.release()

    def pause(self, seconds: float) -> None:
        self._wake_at(self.now_s + seconds, self.running)
        self._let_others_run()

    def park(self, timeout_s: float | None = None) -> None:
        """Waits until another process wakes this one, or until the timeout."""
        if timeout_s is not None:
            self._wake_at(self.now_s + timeout_s, self.running)
        self._let_others_run()

    def wake(self, process: Process, at_s: float) -> None:
        self._wake_at(at_s, process)

    def _wake_at(self, at_s: float, process: Process) -> None:
        heapq.heappush(self._next, (at_s, next(self._order), process.ticket, process))

    def _let_others_run(self) -> None:
        process = self.running
        if self._hand_over() is not process:
            process.turn.acquire()
        if self._is_over:
            raise _Over
        process.ticket += 1  # other wake-ups come too late

    def _hand_over(self) -> Process | None:
        before = self._running
        while self._next:
            at_s, _, ticket, process = heapq.heappop(self._next)
            if process.is_over or ticket != process.ticket:
                continue
            self.now_s, self._running = at_s, process
            if process is not before:
                process.turn.release()
            return process
        self._running = None
        self._done.release()
        return None

    def _live(self, process: Process) -> None:
        process.turn.acquire()
        try:
            if self._is_over:
                return
            process.ticket += 1
            process.act()
        except _Over:
            return
        except BaseException as error:  # noqa: BLE001 (raised by `run`)
            self._error = self._error or error
            self._next.clear()
        process.is_over = True
        for each in process.joined_by:
            self._wake_at(self.now_s, each)
        self._hand_over()


@dataclass
class Traffic:
    """Requests by kind: their number, and the bytes in both directions."""

    messages: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    def note(self, kind: str, size: int = 0, times: int = 1) -> None:
        self.messages[kind] += times
        self.bytes += size


@dataclass(frozen=True)
class Costs:
    """The costs of a coordination service.

    Args:
        round_trip_s: Network latency from a worker to the service and back, in seconds.
        message_s: Seconds per message and answer, which the service processes one by one: as
            measured for TensorFlow's by `benchmarks/scale.py --measure`, including the client's
            part.
        bytes_per_s: Throughput of the service, from the same measurement.
    """

    round_trip_s: float = 0.0002
    message_s: float = 0.0003
    bytes_per_s: float = 1.2e8


class Service:
    """A coordination service: the package's `KeyValues`."""

    def __init__(self, clock: Clock, workers: int, costs: Costs) -> None:
        self.traffic = Traffic()
        self.values: dict[str, str] = {}
        self._clock = clock
        self._workers = workers
        self._costs = costs
        self._free_s = 0.0
        self._waiting: dict[str, list[Process]] = {}
        self._there: dict[str, list[Process]] = {}

    def put(self, key: str, value: str) -> None:
        assert self.put_first(key, value), f"{key} is sent twice"

    def put_first(self, key: str, value: str) -> bool:
        self._arrive("put", len(key) + len(value))
        is_first = key not in self.values
        if is_first:
            self.values[key] = value
        answered_s = self._answered_s()
        for process in self._waiting.pop(key, []) if is_first else []:
            self._clock.wake(process, self._answered_s(len(value)))
        self._clock.pause(answered_s - self._clock.now_s)
        return is_first

    def get(self, key: str, timeout_s: float | None) -> str:
        self._arrive("get", len(key))
        if key in self.values:
            self._clock.pause(self._answered_s(len(self.values[key])) - self._clock.now_s)
        else:
            process = self._clock.running
            self._waiting.setdefault(key, []).append(process)
            self._clock.park(timeout_s)
            if key not in self.values:
                self._waiting[key].remove(process)
                raise TimeoutError(key)
        self.traffic.note("get", len(self.values[key]), times=0)
        return self.values[key]

    def delete(self, key: str) -> None:
        self._arrive("delete", len(key))
        for each in [each for each in self.values if f"{each}/".startswith(f"{key}/")]:
            del self.values[each]
        self._clock.pause(self._answered_s() - self._clock.now_s)

    def barrier(self, key: str, timeout_s: float) -> None:
        self._arrive("barrier", len(key))
        there = self._there.setdefault(key, [])
        there.append(self._clock.running)
        if len(there) < self._workers:
            self._clock.park()
            return
        for process in there:
            self._clock.wake(process, self._answered_s())
        self._clock.park()

    def _arrive(self, kind: str, size: int) -> None:
        self.traffic.note(kind, size)
        self._clock.pause(self._costs.round_trip_s / 2)
        begin_s = max(self._free_s, self._clock.now_s)
        self._free_s = begin_s + self._costs.message_s + size / self._costs.bytes_per_s

    def _answered_s(self, size: int = 0) -> float:
        """Returns the arrival time of the service's next answer."""
        self._free_s = max(self._free_s, self._clock.now_s) + size / self._costs.bytes_per_s
        return self._free_s + self._costs.round_trip_s / 2


@dataclass(frozen=True)
class StoreCosts:
    """The costs of an object store.

    Args:
        first_byte_s: Latency of every request, in seconds.
        bytes_per_s: Throughput of every connection; the total is unlimited.
        reads_per_s: Reads and listings per second for one prefix; others wait.
        writes_per_s: Writes, copies and deletions per second for one prefix.
        page: Number of names in a response to a listing.
    """

    first_byte_s: float = 0.03
    bytes_per_s: float = 1e8
    reads_per_s: float = 5500
    writes_per_s: float = 3500
    page: int = 1000


class Bucket:
    """A remote store that all workers share: the package's `Files`, for one prefix.

    Args:
        clock: The clock.
        costs: Costs of the store.
        stand_for: Number of bytes that every byte of an array file stands for.
        also: Additional bytes of files, by the end of their paths.
    """

    def __init__(
        self,
        clock: Clock,
        costs: StoreCosts,
        stand_for: int = 1,
        also: dict[str, int] | None = None,
    ) -> None:
        self.traffic = Traffic()
        self._clock = clock
        self._costs = costs
        self._stand_for = stand_for
        self._also = also or {}
        self._files: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, None]] = {}
        self._free_s = {"read": 0.0, "write": 0.0}

    def seen_by_worker(self) -> FilesOfWorker:
        return FilesOfWorker(self)

    def ask(self, kind: str, of: str, size: int = 0, times: int = 1) -> None:
        self.traffic.note(kind, size, times)
        rate = {"read": self._costs.reads_per_s, "write": self._costs.writes_per_s}[of]
        for _ in range(times):
            self._free_s[of] = max(self._free_s[of], self._clock.now_s) + 1 / rate
        moved_s = size / self._costs.bytes_per_s + times * self._costs.first_byte_s
        self._clock.pause(self._free_s[of] - self._clock.now_s + moved_s)

    def get_size(self, path: str, size: int) -> int:
        for end, bytes_ in self._also.items():
            if path.endswith(end):
                return bytes_
        return size * self._stand_for


class FilesOfWorker:
    """A worker's view of a `Bucket`. Like `RemoteFiles`, it caches sizes of files.

    These are known from listings and requests.
    """

    traits = Traits(file_bytes=32 * 2**20, at_once=1, is_near=False)

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._sizes: dict[str, int] = {}
        self._owed = 0  # small requests, which never queue

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        body = b"".join(parts)
        self._bucket.ask("PUT", "write", self._bucket.get_size(path, len(body)))
        if path in self._bucket._files:
            raise FileExistsError(path)
        self._bucket._files[path] = body
        while path:
            path, _, name = path.rpartition("/")
            self._bucket._folders.setdefault(path, {})[name] = None

    def copy(self, source: str, path: str) -> None:
        raise OSError("not modelled")

    def read(self, path: str) -> bytes:
        body = self._bucket._files[path]
        self._bucket.ask("GET", "read", self._bucket.get_size(path, len(body)))
        return body

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        end = min(offset + len(buffer), self.size(path))
        count = max(0, end - offset)
        buffer[:count] = self._bucket._files[path][offset:end]
        if count >= _FEW_BYTES:
            self._bucket.ask("GET", "read", self._bucket.get_size(path, count), 1 + self._owed)
            self._owed = 0
        elif count:
            self._owed += 1  # combined with later ones, which makes the simulation faster
        return count

    def size(self, path: str) -> int:
        if path not in self._sizes:
            self._bucket.ask("HEAD", "read")
            if path not in self._bucket._files:
                raise FileNotFoundError(path)
            self._sizes[path] = len(self._bucket._files[path])
        return self._sizes[path]

    def names(self, folder: str = "") -> list[str]:
        found = sorted(self._bucket._folders.get(folder, {}))
        self._bucket.ask(
            "LIST", "read", 300 * len(found), 1 + len(found) // self._bucket._costs.page
        )
        for name in found:
            path = f"{folder}/{name}" if folder else name
            if path in self._bucket._files:
                self._sizes[path] = len(self._bucket._files[path])
        return found

    def delete(self, path: str) -> None:
        gone = [each for each in self._bucket._files if f"{each}/".startswith(f"{path}/")]
        # A thousand at a time, as in S3.
        self._bucket.ask("DELETE", "write", times=1 + len(gone) // self._bucket._costs.page)
        for each in gone:
            del self._bucket._files[each]
            while each and not self._bucket._folders.get(
                each
            ):  # object stores have no empty folders
                folder, _, name = each.rpartition("/")
                self._bucket._folders[folder].pop(name)
                each = folder

    def delete_if_empty(self) -> None:
        return

    def where(self, path: str = "") -> str:
        return f"simulated://{path}"


class _Questions:
    """Counters per worker, because every worker is its own process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: Counter[int] = Counter()

    def __next__(self) -> int:
        self._counts[self._clock.running.worker] += 1
        return self._counts[self._clock.running.worker]


@contextmanager
def simulation() -> Iterator[Clock]:
    """A simulation in which the package's threads are processes of their workers."""
    clock = Clock()
    stack_bytes = threading.stack_size(_STACK_BYTES)

    def run_in_background(act: Callable[[], object]) -> Any:
        return clock.start(clock.running.worker, act)

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(listeners, "run_in_background", run_in_background))
        patched.enter_context(mock.patch.object(listeners, "close_at_exit"))
        patched.enter_context(mock.patch.object(channel, "_questions", _Questions(clock)))
        # Sequentially, in the calling thread.
        patched.enter_context(mock.patch.object(checkpoint_store, "_READERS", 1))
        try:
            yield clock
        finally:
            clock.end()
            threading.stack_size(stack_bytes)
