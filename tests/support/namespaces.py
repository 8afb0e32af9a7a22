"""Two network namespaces with a link between them, as two hosts: here the network can be made to fail."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

CLONE_NEWNET = 0x40000000


class Hosts:
    """Namespaces ``names`` at ``addresses``."""

    def __init__(self, number: int) -> None:
        tag = f"zgt{number % 10_000}"
        self.names = (f"{tag}a", f"{tag}b")
        self.addresses = ("10.213.7.1", "10.213.7.2")
        self._links = (f"{tag}0", f"{tag}1")

    def open(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        (a, b), (link_a, link_b) = self.names, self._links
        _run("ip", "link", "add", link_a, "netns", a, "type", "veth", "peer", "name", link_b, "netns", b)
        for name, link, address in zip(self.names, self._links, self.addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", link, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):  # of those that were never made
                _run("ip", "netns", "del", name)

    def command(self, name: str, *command: str) -> None:
        """Run a command on the host in namespace ``name``."""
        _run("ip", "netns", "exec", name, *command)

    def environment(self) -> dict[str, str]:
        """For :func:`enter`, and to meet at the first host."""
        return {
            "ZG_TEST_HOSTS": ",".join(self.names),
            "MASTER_ADDR": self.addresses[0],
            "ZMQGRAD_SECRET": "the secret of this job, of 33 bytes",
        }

    def kill_connections(self) -> None:
        """Reset every connection between the two."""
        for name, address in zip(self.names, reversed(self.addresses), strict=True):
            _run("ip", "netns", "exec", name, "ss", "-K", "-t", "dst", address)

    @contextmanager
    def link_down(self) -> Iterator[None]:
        """Nothing arrives meanwhile."""
        _run("ip", "-n", self.names[0], "link", "set", self._links[0], "down")
        try:
            yield
        finally:
            _run("ip", "-n", self.names[0], "link", "set", self._links[0], "up")

    @contextmanager
    def rejecting(self, host: int) -> Iterator[None]:
        """A firewall answers every packet to ``host`` by a reset meanwhile."""
        rule = ("INPUT", "-p", "tcp", "-i", self._links[host], "-j", "REJECT", "--reject-with", "tcp-reset")
        command = ("ip", "netns", "exec", self.names[host], "iptables", "-w")
        _run(*command, "-I", *rule)
        try:
            yield
        finally:
            _run(*command, "-D", *rule)

    def can_reject(self) -> bool:
        """Is there a firewall to be had?"""
        if shutil.which("iptables") is None:
            return False
        try:
            with self.rejecting(0):
                return True
        except subprocess.CalledProcessError:
            return False


def enter(rank: int) -> None:
    """Let the calling thread, and those it starts, be on the host of ``rank``: even ones on the first."""
    name = os.environ["ZG_TEST_HOSTS"].split(",")[rank % 2]
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Skips the test where no namespaces can be made."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and iproute2")
    made = Hosts(os.getpid())
    try:
        try:
            made.open()
        except subprocess.CalledProcessError as e:
            pytest.skip(f"no network namespaces here: {e.stderr.strip()}")
        yield made
    finally:
        made.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
