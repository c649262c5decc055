from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from stores import servers
from stores.ceph import ceph
from stores.servers import Place

# On import, gcsfs decides to ask for the kind of a bucket, which no emulator supports.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


@contextmanager
def memory(folder: Path) -> Iterator[Place]:
    yield Place(f"memory://{uuid.uuid4().hex}")


@contextmanager
def local(folder: Path) -> Iterator[Place]:
    yield Place(str(folder / "root"))


STORES = {
    "local": local,
    "memory": memory,
    "moto": servers.moto,
    "ceph": ceph,
    "azurite": servers.azurite,
    "gcs": servers.gcs,
    "sftp": servers.sftp,
}


class Started:
    """The stores that tests have requested, each started once."""

    def __init__(self, stack: ExitStack, paths: pytest.TempPathFactory) -> None:
        self._stack = stack
        self._paths = paths
        self._places: dict[str, Place] = {}

    def __getitem__(self, name: str) -> Place:
        if name not in self._places:
            store = STORES[name](self._paths.mktemp(name))
            self._places[name] = self._stack.enter_context(store)
        return self._places[name].folder()


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with ExitStack() as stack:
        yield Started(stack, tmp_path_factory)


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, stores: Started) -> Place:
    """Yields a new folder in every store."""
    return stores[request.param]
