"""Networks of namespaces: hosts with several interfaces, and hosts behind a NAT."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

CLONE_NEWNET = 0x40000000


class Networks:
    """Namespaces, which are removed by :meth:`close`. Names of interfaces count within their namespace."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self.hosts: list[str] = []

    def add(self, host: str) -> str:
        """Make a host, and return the name of its namespace."""
        name = f"{self._tag}{host}"
        run("ip", "netns", "add", name)
        self.hosts.append(name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def link(self, one: str, interface: str, other: str, other_interface: str, *subnets: str) -> None:
        """Connect two hosts. Each of ``subnets`` is a prefix, in which they are 1 and 2."""
        run(
            *("ip", "link", "add", interface, "netns", one, "type", "veth"),
            *("peer", "name", other_interface, "netns", other),
        )
        for number, (host, name) in enumerate(((one, interface), (other, other_interface)), 1):
            for subnet in subnets:
                length = ("/64", "nodad") if ":" in subnet else ("/24",)
                run(
                    "ip",
                    "-n",
                    host,
                    "addr",
                    "add",
                    subnet + str(number) + length[0],
                    "dev",
                    name,
                    *length[1:],
                )
            run("ip", "-n", host, "link", "set", name, "up")

    def iptables(self, host: str, rule: str) -> None:
        """Add a rule to the firewall of ``host``. Skips the test where the kernel has none."""
        try:
            self.run(host, "iptables", "-w", *rule.split())
        except (subprocess.CalledProcessError, FileNotFoundError) as e:
            pytest.skip(f"no firewall here: {e}")

    def run(self, host: str, *command: str) -> None:
        """Run a command on ``host``."""
        run("ip", "netns", "exec", host, *command)

    def close(self) -> None:
        for name in self.hosts:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)


def enter_namespace(name: str) -> None:
    """Let the calling thread, and those it starts, be on the host ``name``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Skips the test where no namespaces can be made."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, iproute2 and root")
    made = Networks(f"zgh{os.getpid() % 100_000}")
    try:
        yield made
    finally:
        made.close()


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
