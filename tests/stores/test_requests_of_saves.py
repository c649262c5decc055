"""The number of a save's requests does not grow with the number of checkpoints that are kept."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import fsspec.implementations.memory
import numpy as np
import pytest
from storage.checkpoints import Checkpoints
from storage.forks import system_calls
from stores.conftest import STORES, Started
from stores.flaky import Proxy, in_front_of
from stores.servers import Place
from stores.test_files_of_stores import OBJECT_STORES

from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.files import open_files

pytestmark = [pytest.mark.stores, pytest.mark.timeout(300)]

MANY = {"moto": 200, "memory": 200, "local": 200}  # 30 in other stores
LISTS = {"local": "listdir", "memory": "ls", "sftp": "opendir"}
Requests = Counter[str]


def state(step: int) -> TrainState:
    return TrainState(Cursor(epoch=0, batch=0, step=step), {"a": np.full(3, step, np.float32)})


class Store:
    """A store whose requests are counted, except those of preparations.

    Args:
        name: The kind of store.
        place: A folder in it.
        counted_place: The same folder, with counted requests.
        count: Returns the requests made so far.

    """

    def __init__(
        self,
        name: str,
        place: Place,
        counted_place: Place,
        count: Callable[[Callable[[], object]], Requests],
    ) -> None:
        self.name = name
        self._place, self._counted_place = place, counted_place
        self.count = count

    def run(self, run: str, keep_last: int, *, is_counted: bool) -> Checkpoints:
        """Returns a process that saves; it has opened its connection."""
        place = self._counted_place if is_counted else self._place
        files = open_files(place.url, place.options)
        files.names("nothing")
        return Checkpoints(files, keep_last, run=run)

    def saves(self, kept: int) -> list[Requests]:
        """Returns the requests of the first four saves of a process that found `kept` checkpoints
        of another one, and keeps as many."""
        run = f"run-{kept:04d}"
        before = self.run(run, kept, is_counted=False)
        for step in range(1, kept + 1):
            before.save(state(step))
        saving = self.run(run, kept, is_counted=True)
        found = [
            self.count(lambda step=step: saving.save(state(step)))  # type: ignore[misc]
            for step in range(kept + 1, kept + 5)
        ]
        there = self.run(run, kept, is_counted=False).committed("step")
        assert there == [f"step-{step:08d}" for step in range(5, kept + 5)]
        return found


@pytest.fixture(params=STORES)
def store(
    request: pytest.FixtureRequest, stores: Started, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    name, place = request.param, stores[request.param]
    if name == "local":
        yield Store(name, place, place, lambda action: Counter(system_calls(action)))
    elif name == "memory":
        yield Store(name, place, place, lambda action: _calls_of_memory(action, monkeypatch))
    elif name == "sftp":
        yield Store(name, place, place, lambda action: _requests_by_ssh(action, monkeypatch))
    else:
        options = json.dumps(dict(place.options))
        [port] = re.findall(r"127\.0\.0\.1:(\d+)", options)
        with in_front_of(int(port)) as proxy:
            through = json.loads(options.replace(f"127.0.0.1:{port}", f"127.0.0.1:{proxy.port}"))
            yield Store(
                name, place, Place(place.url, through), lambda action: _by_http(action, proxy)
            )


def _by_http(action: Callable[[], object], proxy: Proxy) -> Requests:
    proxy.requests.clear()
    action()
    return Counter(_kind(method, path) for method, path in proxy.requests)


def _kind(method: str, path: str) -> str:
    is_list = re.search(r"list-type=|comp=list|/o/?\?|[?&]prefix=", path)
    return "list" if method == "GET" and is_list else method


def _calls_of_memory(action: Callable[[], object], patch: pytest.MonkeyPatch) -> Requests:
    """Counts calls of fsspec's methods from outside of it."""
    kind, found, depth = fsspec.implementations.memory.MemoryFileSystem, Counter[str](), [0]

    def counted(name: str, stock: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += not depth[0]
            depth[0] += 1
            try:
                return stock(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    with patch.context() as within:
        for name in ("ls", "find", "size", "exists", "cat_file", "pipe_file", "rm", "rm_file"):
            within.setattr(kind, name, counted(name, getattr(kind, name)))
        action()
    return found


def _requests_by_ssh(action: Callable[[], object], patch: pytest.MonkeyPatch) -> Requests:
    import paramiko
    from paramiko import sftp

    found, stock = Counter[str](), paramiko.SFTPClient._async_request

    def request(self: Any, file: Any, kind: int, *args: Any) -> Any:
        found[sftp.CMD_NAMES[kind]] += 1
        return stock(self, file, kind, *args)

    with patch.context() as within:
        within.setattr(paramiko.SFTPClient, "_async_request", request)
        action()
    return found


def test_same_number(store: Store) -> None:
    """A save makes the same requests with 1 checkpoint and with many. The first save of a process
    also lists the existing ones, in one request of an object store, and verifies the second
    newest."""
    few, many = store.saves(1), store.saves(MANY.get(store.name, 30))
    print(store.name, few, many)
    if store.name == "local":
        # Listing a folder on disk takes microseconds, so all that are kept are listed before a
        # deletion.
        for kept, found in ((1, few), (MANY["local"], many)):
            for requests in found:
                assert requests.pop("listdir") <= 2 * kept + 6
                assert requests.pop("stat") <= 2 * kept + 100
    assert few[1] == few[2] == few[3]
    assert many[1] == many[2] == many[3] == few[3]
    assert store.name == "local" or few[3][LISTS.get(store.name, "list")] > 0
    if store.name in OBJECT_STORES:
        assert many[0].total() <= many[3].total() + 4
        assert many[0].total() <= few[0].total() + 3
