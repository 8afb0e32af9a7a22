"""Two network namespaces with a link between them, as two hosts: here the network can be made to fail."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

CLONE_NEWNET = 0x40000000
CLONE_APART = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000
"""Namespaces of mounts, names, IPC and processes."""

MS_REC_PRIVATE = 0x4000 | 0x40000
PR_SET_PDEATHSIG = 1


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
    with open(f"/run/netns/{name}") as namespace:
        _system_call("setns", namespace.fileno(), CLONE_NEWNET)


def move_apart(rank: int) -> None:
    """As :func:`enter`, in a process that shares no kernel object with those of the other host. Returns in a
    child; the calling process, which must have one thread, only waits for it, and ends as it does.

    In a network namespace alone, a process finds those of the "other host" by their ids: torch then copies
    from their memory (the ``cma`` channel of tensorpipe) instead of using the network.
    """
    enter(rank)
    _system_call("unshare", CLONE_APART)
    child = os.fork()  # the namespace of processes is that of children
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _system_call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL))
    _system_call("mount", b"none", b"/", None, MS_REC_PRIVATE, None)
    _system_call("mount", b"proc", b"/proc", b"proc", 0, None)


def _system_call(name: str, *arguments: bytes | int | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{arguments}: {os.strerror(code)}")


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
