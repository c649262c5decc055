"""Stores that run on this machine during the tests."""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.cluster import free_ports
from support.needed import missing

START_TIMEOUT_S = 60
# Public: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
HOW = "Run pip install '.[test-stores]'."


@dataclass(frozen=True)
class Place:
    """An empty folder in a store.

    Args:
        url: Its URL.
        options: Its `storage_options`.

    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def folder(self) -> Place:
        """Returns a new folder in it."""
        return Place(f"{self.url}/{uuid.uuid4().hex}", self.options)


@contextmanager
def running(command: list[str], port: int | None, log: Path) -> Iterator[None]:
    """Yields a server once it listens on its port; immediately if it has no port."""
    # It ends with the tests, even if they are killed.
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while port is not None and not listens(port):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=30)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def moto(folder: Path) -> Iterator[Place]:
    """Yields S3, as provided by moto."""
    program = Path(sys.executable).with_name("moto_server")
    if not (importlib.util.find_spec("s3fs") and program.exists()):
        missing("s3fs, or moto's server,", HOW)
    [port] = free_ports(1)
    command = [str(program), "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port, folder / "moto.log"):
        options = {
            **{"key": "test-key", "secret": "test-secret-of-s3"},
            "endpoint_url": f"http://127.0.0.1:{port}",
        }
        import s3fs

        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("bucket")
        yield Place("s3://bucket", options)


@contextmanager
def sftp(folder: Path) -> Iterator[Place]:
    """Yields OpenSSH's server."""
    if not importlib.util.find_spec("paramiko"):
        missing("paramiko", HOW)
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        missing("sshd", "Run apt-get install openssh-server.")
    assert program is not None
    [port] = free_ports(1)
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True, timeout=30)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
        "Subsystem sftp internal-sftp\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # the folder for its privilege separation
    command = [program, "-D", "-e", "-f", str(folder / "config")]
    with running(command, port, folder / "sshd.log"):
        options = {"username": getpass.getuser(), "key_filename": str(folder / "user")}
        yield Place(f"sftp://127.0.0.1:{port}{folder}/root", options)


@contextmanager
def azurite(folder: Path) -> Iterator[Place]:
    """Yields Azure Blob Storage, as provided by Azurite."""
    if not importlib.util.find_spec("adlfs"):
        missing("adlfs", HOW)
    program = shutil.which("azurite-blob")
    if program is None:
        missing("azurite-blob", "Run npm install --global azurite.")
    assert program is not None
    [port] = free_ports(1)
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    command = [program, *where, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with running(command, port, folder / "azurite.log"):
        # The well-known account and key of every Azurite.
        account = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": "devstoreaccount1",
            "AccountKey": AZURITE_KEY,
            "BlobEndpoint": f"http://127.0.0.1:{port}/devstoreaccount1",
        }
        options = {"connection_string": ";".join(f"{k}={v}" for k, v in account.items())}
        import adlfs

        adlfs.AzureBlobFileSystem(**options, skip_instance_cache=True).mkdir("container")
        yield Place("az://container", options)


@contextmanager
def gcs(folder: Path) -> Iterator[Place]:
    """Yields the subset of Google's store that gcp-storage-emulator provides: it takes a partial
    upload for a file, and overwrites files that should only be created. So it cannot test kills or
    concurrent writers."""
    if not (importlib.util.find_spec("gcsfs") and importlib.util.find_spec("gcp_storage_emulator")):
        missing("gcsfs, or gcp-storage-emulator,", HOW)
    [port] = free_ports(1)
    where = ["--host", "127.0.0.1", "--port", str(port), "--in-memory"]
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", *where]
    with running(command, port, folder / "gcs.log"):
        import gcsfs

        options = {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "test"}
        gcsfs.GCSFileSystem(**options, skip_instance_cache=True).mkdir("bucket")
        yield Place("gs://bucket", options)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Place]:
    """Yields a disk of `size` bytes, in memory."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, timeout=60, check=False)
    if mounted.returncode:
        pytest.skip(f"no right to mount a small disk: {mounted.stderr}")
    try:
        yield Place(str(folder / "root"))
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)
