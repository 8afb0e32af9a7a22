"""A real etcd cluster on this host, whose members can be killed, stopped and restarted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.relay import Relay
from tests.support.waiting import eventually
from tools.ports import free_port

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd (Debian: etcd-server)")


class EtcdCluster:
    """Use it as a context manager.

    Args:
        size: number of members.
        options: further arguments of each of them.
        scheme: of the addresses for clients.
        relays: let clients and members reach each member through relays, which can be cut.
    """

    def __init__(
        self, size: int = 1, options: Sequence[str] = (), scheme: str = "http", *, relays: bool = False
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="etcd-"))
        self.ports = [free_port() for _ in range(size)]
        self._health = [free_port() for _ in range(size)]
        peer_ports = [free_port() for _ in range(size)]
        self.from_clients = [Relay(port) for port in self.ports] if relays else []
        self.from_members = [Relay(port) for port in peer_ports] if relays else []
        listening = [f"http://127.0.0.1:{port}" for port in peer_ports]
        peers = [f"http://127.0.0.1:{relay.port}" for relay in self.from_members] or listening
        cluster = ",".join(f"m{n}={peer}" for n, peer in enumerate(peers))
        self._commands = [
            [
                *("etcd", "--name", f"m{n}", "--data-dir", str(self._directory / f"{n}")),
                *("--listen-client-urls", f"{scheme}://127.0.0.1:{port}"),
                *("--advertise-client-urls", f"{scheme}://127.0.0.1:{port}"),
                *("--listen-metrics-urls", f"http://127.0.0.1:{health}"),
                *("--listen-peer-urls", listening[n], "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", cluster, "--heartbeat-interval", "50", "--election-timeout", "500"),
                *options,
            ]
            for n, (port, peer, health) in enumerate(zip(self.ports, peers, self._health, strict=True))
        ]
        self._members: list[subprocess.Popen[bytes] | None] = [None] * size

    @property
    def endpoint(self) -> str:
        """For clients."""
        ports = [relay.port for relay in self.from_clients] or self.ports
        return ",".join(f"127.0.0.1:{port}" for port in ports)

    def __enter__(self) -> EtcdCluster:
        try:
            for n in range(len(self.ports)):
                self.start(n)
            for n in range(len(self.ports)):
                eventually(lambda n=n: self.is_healthy(n))
        except BaseException as e:
            told = [path.read_text()[-2000:] for path in sorted(self._directory.glob("*.log"))]
            self.__exit__()
            if isinstance(e, AssertionError):
                raise AssertionError("\n".join([str(e), *told])) from None
            raise
        return self

    def start(self, n: int) -> None:
        with (self._directory / f"{n}.log").open("ab") as log:
            self._members[n] = subprocess.Popen(self._commands[n], stdout=log, stderr=log)

    def is_healthy(self, n: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health[n]}/health", timeout=1) as reply:
                return b'"true"' in reply.read()
        except (urllib.error.URLError, OSError):
            return False

    def await_health(self, n: int) -> None:
        eventually(lambda: self.is_healthy(n), timeout=30)

    def kill(self, n: int) -> None:
        member = self._members[n]
        assert member is not None
        member.kill()
        member.wait()

    def freeze(self, n: int, frozen: bool = True) -> None:
        member = self._members[n]
        assert member is not None
        member.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)
        if frozen:  # a thread of it on another processor may still reply
            os.waitid(os.P_PID, member.pid, os.WSTOPPED)

    def compact(self) -> None:
        """Drop all revisions but the newest."""
        url = f"http://127.0.0.1:{self.ports[0]}/v3/kv"
        everything = b'{"key": "AA==", "range_end": "AA==", "count_only": true}'
        with urllib.request.urlopen(f"{url}/range", everything, timeout=10) as reply:
            revision = json.load(reply)["header"]["revision"]
        urllib.request.urlopen(f"{url}/compaction", b'{"revision": %d}' % int(revision), timeout=10).close()

    def __exit__(self, *error: object) -> None:
        for member in self._members:
            if member is not None:
                member.kill()
                member.wait()
        for relay in (*self.from_clients, *self.from_members):
            relay.close()
        shutil.rmtree(self._directory)
