"""A real Ceph on this machine: a monitor, a disk in memory, and the gateway with S3's API.

cd tests && python -m stores.ceph    # prints its address, runs until Ctrl-C

"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stores import servers
from stores.servers import Place, running
from support.cluster import free_ports
from support.needed import missing

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
HOW = "Run apt-get install --no-install-recommends ceph-mon ceph-osd radosgw."
COMMAND_TIMEOUT_S = 60
KEYS = {"key": "test-key", "secret": "test-secret-of-s3"}
# The keys of a user with a small quota, and that user's bucket.
FULL_KEYS = {"key": "full-key", "secret": "full-secret-of-s3"}
FULL_BUCKET, FULL_BYTES = "full", 2 * 2**20

CONFIG = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{monitor_port}
mon data = {folder}/monitor
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
run dir = {folder}
admin socket =
pid file =
crash dir = {folder}
log file = {folder}/$name.log
keyring = {folder}/keyring
osd data = {folder}/disk
osd objectstore = memstore
memstore device bytes = 8589934592
osd class load list = *
osd class default list = *
# Nothing waits for a second disk.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
# What was deleted gives its memory back at once, and not after hours.
rgw gc obj min wait = 1
rgw gc processor period = 2
rgw gc processor max time = 2
rgw frontends = beast endpoint=127.0.0.1:{port}
"""

KEYRING = """
[mon.]
key = {key}
caps mon = "allow *"
[client.admin]
key = {key}
caps mon = "allow *"
caps osd = "allow *"
[osd.0]
key = {key}
caps mon = "allow profile osd"
caps osd = "allow *"
"""


@contextmanager
def ceph(folder: Path) -> Iterator[Place]:
    """Yields S3, as provided by Ceph."""
    if not importlib.util.find_spec("s3fs"):
        missing("s3fs", servers.HOW)
    for program in PROGRAMS:
        if not shutil.which(program):
            missing(f"Ceph's {program}", HOW)
    monitor_port, port = free_ports(2)
    cluster, disk = (str(uuid.uuid4()) for _ in range(2))
    config, monitors = folder / "ceph.conf", str(folder / "monitors")
    config.write_text(
        CONFIG.format(fsid=cluster, folder=folder, monitor_port=monitor_port, port=port)
    )
    # Returns a key in Ceph's format: an AES key of 16 bytes, created at time 0.
    key = base64.b64encode(struct.pack("<hIIH", 1, 0, 0, 16) + os.urandom(16)).decode()
    keyring = folder / "keyring"
    keyring.write_text(KEYRING.format(key=key))
    (folder / "disk").mkdir()

    def run(program: str, *arguments: str) -> None:
        done = subprocess.run(
            [program, "-c", str(config), *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout} {done.stderr}"

    with ExitStack() as daemons:

        def start(program: str, *arguments: str, port: int | None = None) -> None:
            command = [program, "-c", str(config), "-f", *arguments]
            daemons.enter_context(running(command, port, folder / f"{program}.out"))

        address = f"[v2:127.0.0.1:{monitor_port}]"
        run("monmaptool", "--create", "--fsid", cluster, "--addv", "a", address, monitors)
        run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, "--keyring", str(keyring))
        start("ceph-mon", "-i", "a", port=monitor_port)
        run("ceph", "osd", "new", disk)
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        start("ceph-osd", "-i", "0")
        start("radosgw", "-n", "client.admin", port=port)
        for user, keys in (("test", KEYS), ("full", FULL_KEYS)):
            flags = [f"--uid={user}", f"--display-name={user}"]
            keys_flags = [f"--access-key={keys['key']}", f"--secret-key={keys['secret']}"]
            run("radosgw-admin", "user", "create", *flags, *keys_flags)
        quota = ("--uid=full", "--quota-scope=user")
        run("radosgw-admin", "quota", "set", *quota, f"--max-size={FULL_BYTES}")
        run("radosgw-admin", "quota", "enable", *quota)
        import s3fs

        gateway = {"endpoint_url": f"http://127.0.0.1:{port}"}
        for keys, bucket in ((KEYS, "bucket"), (FULL_KEYS, FULL_BUCKET)):
            s3fs.S3FileSystem(**keys, **gateway, skip_instance_cache=True).mkdir(bucket)
        yield Place("s3://bucket", {**KEYS, **gateway})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home, ceph(Path(home)) as place:
        print(f"--url {place.url} --storage-options '{json.dumps(dict(place.options))}'")
        signal.pause()
