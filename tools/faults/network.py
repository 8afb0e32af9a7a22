"""Two hosts (network namespaces) of one cell, and the faults of the network between them."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

from tests.support.namespaces import Hosts
from tools.faults.delay import delayed

_numbers = itertools.count()

PROBABILITY = 0.05


class Network(Hosts):
    """The survivors are on the first host, the victim on the second."""

    def __init__(self) -> None:
        tag = f"zgf{(os.getpid() * 64 + next(_numbers)) % 1_000_000}"
        self.names = (f"{tag}a", f"{tag}b")
        self.addresses = ("10.213.9.1", "10.213.9.2")
        self._links = (f"{tag}0", f"{tag}1")

    @contextmanager
    def filtered(self, *rules: Sequence[str]) -> Iterator[None]:
        """The victim's firewall has ``rules`` meanwhile."""
        with ExitStack() as undo:
            for chain, *rule in rules:
                self.run("iptables", "-w", "-I", chain, *rule)
                undo.callback(self.run, "iptables", "-w", "-D", chain, *rule)
            yield

    @contextmanager
    def shaped(self, *discipline: str) -> Iterator[None]:
        """Both ends of the link have this queueing discipline meanwhile."""
        with ExitStack() as undo:
            for host, link in enumerate(self._links):
                self.run("tc", "qdisc", "add", "dev", link, "root", *discipline, host=host)
                undo.callback(self.run, "tc", "qdisc", "del", "dev", link, "root", host=host)
            yield

    def forgotten(self) -> list[Sequence[str]]:
        """Rules that drop the packets of all present connections, as a NAT that has forgotten them."""
        rules: list[Sequence[str]] = []
        for line in self.run("ss", "-tnH").splitlines():
            ours, theirs = (end.rsplit(":", 1)[1] for end in line.split()[3:5])
            rules.append(("INPUT", "-p", "tcp", "--sport", theirs, "--dport", ours, "-j", "DROP"))
            rules.append(("OUTPUT", "-p", "tcp", "--sport", ours, "--dport", theirs, "-j", "DROP"))
        return rules

    def run(self, *command: str, host: int = 1) -> str:
        """Run a command on a host; returns its output."""
        whole = ("ip", "netns", "exec", self.names[host], *command)
        return subprocess.run(whole, check=True, capture_output=True, text=True, timeout=20).stdout


@cache
def missing(feature: str) -> str:
    """Why this machine lacks ``feature``: hosts, firewall, loss, delay, bandwidth or mount. Empty: no."""
    try:
        with ExitStack() as undo:
            if feature == "mount":
                directory = undo.enter_context(tempfile.TemporaryDirectory())
                undo.enter_context(small_disk(directory))
                return ""
            network = Network()
            undo.callback(network.close)
            network.open()
            if feature in ("firewall", "loss"):
                undo.enter_context(network.filtered(LOSS if feature == "loss" else DROP_IN))
            if feature == "delay":
                undo.enter_context(delayed(network))
            if feature == "bandwidth":
                undo.enter_context(network.shaped(*BANDWIDTH))
    except FileNotFoundError as e:
        return f"{e.filename} is not installed"
    except OSError as e:
        return str(e)
    except subprocess.CalledProcessError as e:
        return f"{e.cmd[0] if e.cmd[0] != 'ip' else e.cmd[4]}: {' '.join(e.stderr.split())}"[:200]
    return ""


@contextmanager
def small_disk(directory: str) -> Iterator[None]:
    """A file system of 16 MB is mounted at ``directory`` meanwhile."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "zmqgrad-faults", directory],
        check=True,
        capture_output=True,
        text=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True, capture_output=True)


DROP_IN = ("INPUT", "-p", "tcp", "-j", "DROP")
DROP_OUT = ("OUTPUT", "-p", "tcp", "-j", "DROP")
RESET_IN = ("INPUT", "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
RESET_OUT = ("OUTPUT", "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
LOSS = ("INPUT", "-m", "statistic", "--mode", "random", "--probability", str(PROBABILITY), "-j", "DROP")
BANDWIDTH = ("tbf", "rate", "10mbit", "burst", "32kb", "latency", "400ms")
