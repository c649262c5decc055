"""Workers in network namespaces on a bridge, whose network can be slowed down or cut."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from support.cluster import Host

DEVICE = "net0"  # in every namespace


@dataclass(frozen=True)
class Machine(Host):
    """A host with its own address.

    Args:
        link: Its interface on the bridge.
    """

    link: str = ""

    def cut(self) -> None:
        """Drops all of its traffic in both directions, without notifying anyone."""
        self._set("down")

    def mend(self) -> None:
        self._set("up")

    def _set(self, state: str) -> None:
        subprocess.run(["ip", "link", "set", self.link, state], timeout=30, check=True)


@contextmanager
def hosts(count: int) -> Iterator[list[Machine]]:
    """Creates this many hosts with their own addresses. Skips the test if that is not permitted."""
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("no `ip` and `tc`: apt install iproute2")
    token = uuid.uuid4()  # the kernel removes the remains of another test with some delay
    subnet, name = f"10.{64 + token.bytes[0] % 64}.{token.bytes[1]}", f"kd{token.hex[:8]}"
    made: list[list[str]] = []

    def make(undo: str, *commands: str) -> None:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
            if done.returncode:
                pytest.skip(f"no right to make a network: {command}: {done.stderr.strip()}")
            if undo and command == commands[0]:
                made.append(undo.split())

    try:
        make(f"ip link del {name}", f"ip link add {name} type bridge", f"ip link set {name} up")
        found = []
        for each in range(count):
            space, end = f"{name}-{each}", f"{name}.{each}"
            inside = f"ip -n {space}"
            address = f"{subnet}.{each + 1}"
            make(f"ip netns del {space}", f"ip netns add {space}")
            make(
                "",
                f"ip link add {end} type veth peer name {DEVICE} netns {space}",
                f"ip link set {end} master {name} up",
                f"{inside} addr add {address}/24 dev {DEVICE}",
                f"{inside} link set {DEVICE} up",
                f"{inside} link set lo up",
            )
            found.append(Machine(address, ("ip", "netns", "exec", space), end))
        yield found
    finally:
        for undo in reversed(made):
            subprocess.run(undo, capture_output=True, timeout=30, check=False)
