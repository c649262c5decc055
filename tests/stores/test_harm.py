"""Stores that fail: promises hold, and the error is ours, in bounded time."""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import stamina
from stores.ceph import FULL_BUCKET, FULL_BYTES, FULL_KEYS
from stores.conftest import Started
from stores.flaky import Proxy, Rule, in_front_of
from stores.servers import AZURITE_KEY, Place, small_disk
from stores.writer import NoExchange

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, SaveError
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage import runs
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.stores.object_store import MemoryStore, ObjectStore
from keras_distplug.storage.stores.remote import RemoteFiles

pytestmark = [pytest.mark.stores, pytest.mark.timeout(300)]

T = TypeVar("T")
SECRETS = ("test-secret-of-s3", AZURITE_KEY)


@pytest.fixture(autouse=True)
def tried_again_at_once() -> Iterator[None]:
    stamina.set_testing(True, attempts=5)
    yield
    stamina.set_testing(False)


@pytest.fixture(params=["moto", "azurite"])
def flaky(request: pytest.FixtureRequest, stores: Started) -> Iterator[tuple[Place, Proxy]]:
    """A store, and the proxy in front of it."""
    place = stores[request.param]
    options = json.dumps(dict(place.options))
    [port] = re.findall(r"127\.0\.0\.1:(\d+)", options)
    with in_front_of(int(port)) as proxy:
        through = json.loads(options.replace(f"127.0.0.1:{port}", f"127.0.0.1:{proxy.port}"))
        if request.param == "moto":
            # The retries of botocore and s3fs are not under test.
            through["config_kwargs"] = {"retries": {"max_attempts": 0}}
        yield Place(place.url, through), proxy


def state(step: int) -> TrainState:
    arrays = {f"v{i}": np.random.default_rng(step + i).random(40_000) for i in range(3)}
    return TrainState(Cursor(epoch=0, batch=0, step=step), arrays)


class Run:
    """A run of one process in a store."""

    def __init__(self, place: Place, timeout_s: float = 60, continued: Run | None = None) -> None:
        self.files: Files = open_files(place.url, place.options)
        if isinstance(self.files, RemoteFiles):
            self.files = RemoteFiles(self.files._store, place.url, place.options, timeout_s)
        self.name = (
            continued.name if continued else runs.create_run(self.files, job=None, seed=0).name
        )
        self.store = CheckpointStore(self.files, self.name)
        self.writer = Writer(self.files, self.store, Team(0, 1, NoExchange()))

    def save(self, step: int) -> None:
        self.writer.save(state(step), Writer.new_attempt())

    def holds(self, step: int) -> bool:
        """True if that is the newest checkpoint, bit for bit, as read by a process without prior
        knowledge."""
        fresh = CheckpointStore(self.files, runs.newest_run(self.files).name)  # type: ignore[union-attr]
        stored = fresh.newest("step")
        assert stored is not None
        return stored.manifest.cursor.step == step and all(
            np.array_equal(value, state(step).arrays[key]) for key, value in stored.values()
        )


@pytest.mark.parametrize(
    "rule",
    [
        Rule("status", "PUT", times=2),
        Rule("status", "PUT", times=2, code=429),
        Rule("status", "GET|HEAD", times=3),
        Rule("reset_request", "PUT", "safetensors", times=2, after_bytes=2**17),
        Rule("lost_reply", "PUT", "safetensors", times=1),
        Rule("lost_reply", "PUT", "MANIFEST", times=1),
        Rule("lost_reply", "PUT", times=2),
    ],
    ids=lambda rule: f"{rule.harm}-{rule.method}-{rule.path}-{rule.code}",
)
def test_temporary_faults(flaky: tuple[Place, Proxy], rule: Rule) -> None:
    """A save survives temporary faults, and the checkpoint is intact."""
    place, proxy = flaky
    run = Run(place)
    run.save(1)
    before = proxy.harmed
    proxy.harm(rule)
    run.save(2)
    assert proxy.harmed > before
    proxy.mend()
    assert run.holds(2)


@pytest.mark.parametrize(
    "rule",
    [
        Rule("status", "GET|HEAD", times=3),
        Rule("reset_reply", "GET", "safetensors", times=3, after_bytes=2**17),
        Rule("reset_reply", "GET", times=3, after_bytes=100),
    ],
    ids=lambda rule: f"{rule.harm}-{rule.after_bytes}",
)
def test_faults_while_reading(flaky: tuple[Place, Proxy], rule: Rule) -> None:
    """A read that is interrupted is repeated."""
    place, proxy = flaky
    run = Run(place)
    run.save(1)
    proxy.harm(rule)
    assert run.holds(1)
    assert proxy.harmed


@pytest.mark.parametrize(
    "rule",
    [
        Rule("status", "PUT", "safetensors"),
        Rule("status", "PUT", "safetensors", code=507),
        Rule("status", "PUT", "MANIFEST", code=403),
        Rule("reset_request", "PUT", "safetensors"),
        Rule("stall", "PUT", "MANIFEST"),
    ],
    ids=lambda rule: f"{rule.harm}-{rule.path}-{rule.code}",
)
def test_permanent_faults(flaky: tuple[Place, Proxy], rule: Rule) -> None:
    """A save that cannot succeed raises one error of ours, which names the store; the previous
    checkpoint is untouched, and the next save succeeds once the store works."""
    place, proxy = flaky
    run = Run(place, timeout_s=5 if rule.harm == "stall" else 60)
    run.save(1)
    proxy.harm(rule)
    with pytest.raises(SaveError, match=rf"step 2 could not be written to {place.url}") as raised:
        run.save(2)
    assert not any(secret in str(raised.value) for secret in SECRETS)
    assert proxy.harmed
    proxy.mend()
    assert run.holds(1)
    run.save(3)
    assert run.holds(3)


def test_stalled_read(flaky: tuple[Place, Proxy]) -> None:
    """A store that does not answer is an error, not damage: nothing is quarantined."""
    place, proxy = flaky
    run = Run(place, timeout_s=5)
    run.save(1)
    stamina.set_testing(True, attempts=1)
    proxy.harm(Rule("stall", "GET", "safetensors"))
    with pytest.raises(CheckpointError, match=r"cannot be read: .*no answer within 5 s") as raised:
        run.holds(1)
    assert not isinstance(raised.value, CorruptCheckpointError)
    proxy.mend()
    assert run.holds(1)


def test_late_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was abandoned while waiting for its connection is not sent later."""
    files = RemoteFiles(MemoryStore(), f"memory://{uuid.uuid4().hex}", {}, timeout_s=0.1)
    connect, may_connect = ObjectStore.connect, threading.Event()
    threads = []

    def connect_late(*args: Any) -> Any:
        threads.append(threading.current_thread())
        assert may_connect.wait(30)
        return connect(*args)

    monkeypatch.setattr(ObjectStore, "connect", connect_late)
    with pytest.raises(TimeoutError, match="no answer within"):
        files.create("a", [b"late"])
    may_connect.set()
    [late] = threads
    late.join(30)
    assert not late.is_alive()
    assert files.names() == []


@pytest.mark.parametrize("harm", ["bit", "cut", "gone"])
@pytest.mark.parametrize("file", ["safetensors", "MANIFEST.json"])
def test_damage(place: Place, harm: str, file: str) -> None:
    """Changed bytes are reported, in every store."""
    files = open_files(place.url, place.options)
    name = runs.create_run(files, job=None, seed=0).name
    store = CheckpointStore(files, name)
    writer = Writer(files, store, Team(0, 1, NoExchange()))
    for step in (1, 2):
        writer.save(state(step), Writer.new_attempt())
    [shard] = store.read("step-00000002").manifest.shards
    path = store.path("step-00000002", shard.file if file == "safetensors" else file)
    data = bytearray(files.read(path))
    data[len(data) // 2] ^= 1
    files.delete(path)
    if harm != "gone":
        files.create(path, [data if harm == "bit" else data[:-3]])
    fresh = CheckpointStore(open_files(place.url, place.options), name)
    if file == "safetensors":
        stored = fresh.newest("step")
        assert stored is not None
        with pytest.raises(CorruptCheckpointError, match=shard.file) as raised:
            list(stored.values())
        with pytest.warns(UserWarning, match="step-00000002 is quarantined"):
            fresh.quarantine("step-00000002", raised.value)
        assert "DAMAGED.json" in files.names(store.path("step-00000002"))
    elif harm != "gone":
        with pytest.warns(UserWarning, match=r"step-00000002 is quarantined: .*MANIFEST.json"):
            fresh.newest("step")
    newest = fresh.newest("step")
    assert newest is not None
    assert newest.manifest.cursor.step == 1
    assert dict(newest.values()).keys() == state(1).arrays.keys()


@pytest.mark.parametrize("store", ["moto", "ceph", "azurite"])
def test_missing_bucket(store: str, stores: Started) -> None:
    """A missing bucket is reported when the run is started."""
    scheme = stores[store].url.partition("://")[0]
    files = open_files(f"{scheme}://no-such-bucket/a", stores[store].options)
    with pytest.raises(SaveError, match=r"://no-such-bucket/a.*(no such bucket|does not exist)"):
        runs.create_run(files, job=None, seed=0)


OTHER_KEY = base64.b64encode(bytes(64)).decode()


@pytest.mark.parametrize(
    ("store", "right", "wrong"),
    [
        ("ceph", "test-secret-of-s3", "another-secret"),
        ("ceph", "test-key", "another-key"),
        ("azurite", AZURITE_KEY, OTHER_KEY),
    ],
    ids=["ceph-secret", "ceph-key", "azurite-key"],
)
def test_wrong_credentials(
    store: str, right: str, wrong: str, stores: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused request is reported, and not retried."""
    place = stores[store]
    run = Run(place)
    run.save(1)
    options = json.loads(json.dumps(dict(place.options)).replace(right, wrong))
    refused = Run(Place(place.url, options), continued=run)
    asked, ask = [], RemoteFiles._ask

    def counted(*arguments: Any) -> Any:
        asked.append(arguments[1])
        return ask(*arguments)

    monkeypatch.setattr(RemoteFiles, "_ask", counted)
    with pytest.raises(
        SaveError, match=rf"step 2 .* written to {place.url}.*PermissionError|Http"
    ) as raised:
        refused.save(2)
    assert not any(secret in str(raised.value) for secret in (*SECRETS, wrong))
    with pytest.raises(
        CheckpointError, match=rf"{place.url}.*(Forbidden|Signature|AccessKey|authent)"
    ):
        runs.newest_run(refused.files)
    with pytest.raises(PermissionError):
        refused.files.create("a", [b""])
    assert asked == [run.name, "", "a"]
    assert run.holds(1)


def test_token_that_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary refusal is not final."""
    files = RemoteFiles(MemoryStore(), f"memory://{uuid.uuid4().hex}", {})
    files.create("a", [b"here"])
    refusals = [PermissionError("An error occurred (ExpiredToken): it has expired")] * 2
    monkeypatch.setattr(ObjectStore, "read", refused_first(refusals, ObjectStore.read))
    buffer = bytearray(4)
    assert files.read_into("a", 0, memoryview(buffer)) == 4
    assert buffer == b"here"
    assert not refusals


def refused_first(refusals: list[PermissionError], action: Callable[..., T]) -> Callable[..., T]:
    def refuse(*arguments: Any) -> T:
        if refusals:
            raise refusals.pop()
        return action(*arguments)

    return refuse


def as_nobody(action: Callable[[], None]) -> int:
    """Runs `action` in a process of an unprivileged user; returns 0 if it succeeds."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.setuid(65534)
        action()
        os._exit(0)
    except BaseException:  # noqa: BLE001 (printed, then the process ends)
        traceback.print_exc()
    finally:
        os._exit(1)


def require_room_made(run: Run, leftover: str, size: int) -> None:
    """The leftovers of a killed writer cause at most one failed save; an existing checkpoint is
    kept."""
    run.save(1)
    run.files.create(f"{run.name}/{leftover}/killed/rank-0-1.safetensors", [bytes(size)])
    where = re.escape(run.store.where())
    with pytest.raises(SaveError, match=rf"step 2 .* {where}.*(QuotaExceeded|No space left)"):
        run.save(2)
    assert run.holds(1)
    run.save(2)
    assert run.holds(2)
    left = [run.files.names(f"{run.name}/step-0000000{step}") for step in (1, 2)]
    assert [len(names) for names in left] == [2, 2]


LEFTOVERS = ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_quota(leftover: str, stores: Started) -> None:
    """A full store is reported; existing files are kept, and leftovers deleted."""
    place = stores["ceph"]
    own = Place(f"s3://{FULL_BUCKET}/{uuid.uuid4().hex}", {**place.options, **FULL_KEYS})
    run = Run(own)
    require_room_made(run, leftover, FULL_BYTES // 2)
    run.files.delete(run.name)


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_small_disk(leftover: str, tmp_path: Path) -> None:
    """The same holds for a disk."""
    with small_disk(tmp_path, FULL_BYTES + 2**18) as place:
        require_room_made(Run(place), leftover, FULL_BYTES // 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to another user")
def test_no_permission() -> None:
    """A user without permission to write to a folder gets an error, and can read it."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are not accessible
        os.chmod(folder, 0o755)
        run = Run(Place(folder))
        run.save(1)

        def refused() -> None:
            with pytest.raises(SaveError, match=rf"step 2 .* to {folder}/.*Permission denied"):
                run.save(2)
            assert run.holds(1)

        assert as_nobody(refused) == 0
        run.save(2)
        assert run.holds(2)


@pytest.mark.parametrize(
    ("url", "options", "where"),
    [
        ("sftp://user:pa55-word@127.0.0.1:1/a", {}, "sftp://127.0.0.1:1/a"),
        ("s3://b/a", {"key": "k3y-of-me", "secret": "s3cr3t"}, "s3://b/a"),
        ("s3://b/a", {"client_kwargs": {"aws_session_token": "t0k3n"}}, "s3://b/a"),
    ],
)
def test_secrets(
    url: str, options: Mapping[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No secret appears in errors, even if the store's library puts it there."""
    files = open_files(url, options)
    secrets = ["pa55-word", "k3y-of-me", "s3cr3t", "t0k3n"]

    def fail(*_: object) -> None:
        raise RuntimeError(f"403 for {url} with {options}")

    monkeypatch.setattr(ObjectStore, "connect", fail)
    monkeypatch.setattr("keras_distplug.storage.stores.sftp.Sftp.connect", fail)
    stamina.set_testing(True, attempts=1)
    with pytest.raises(OSError, match="403 for") as raised:
        files.names("a")
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    for secret in secrets:
        assert secret not in str(raised.value)
        assert secret not in files.where("x")
    assert files.where("x") == f"{where}/x"
