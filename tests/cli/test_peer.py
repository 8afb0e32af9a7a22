"""``zmqgrad doctor --peer`` and ``--listen``: what is found about the network between two hosts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.support.networks import Networks, networks
from zmqgrad.__main__ import main
from zmqgrad.cli.checks import Check, Status
from zmqgrad.cli.peer_checks import checked_back, peer_checks
from zmqgrad.cli.peer_connection import Outcome, connect, outcome_of
from zmqgrad.cli.peer_listener import GREETING, PeerListener
from zmqgrad.errors import AddressInUseError
from zmqgrad.store import TCPStore
from zmqgrad.transport.security import load_keys

__all__ = ["networks"]

SLOW = pytest.param(b"\xff", marks=pytest.mark.slow)
"""The first byte of a ZeroMQ socket, which nothing follows."""

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_PORT", "ZMQGRAD_SECRET", "ZMQGRAD_SECRET_FILE", "ZMQGRAD_PORT_RANGE"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def listener(secret: str | None = None) -> Iterator[int]:
    made = PeerListener("127.0.0.1", 0, load_keys(secret) if secret else None)
    try:
        yield made.port
    finally:
        made.close()


def by_name(checks: list[Check]) -> dict[str, Status]:
    return {check.name: check.status for check in checks}


def test_a_stranger_at_the_port_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hello = {"challenge": "", "secured": True, "host": "\x1b]0;x\x07", "at": "", "client": ""}

    def serve(server: socket.socket) -> None:
        stream, _ = server.accept()
        with stream:
            stream.sendall(GREETING + json.dumps(hello).encode() + b"\n")
            stream.recv(4096)
            stream.sendall(b'{"accepted": false}\n')

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        assert main(["doctor", "--peer", f"127.0.0.1:{server.getsockname()[1]}"]) == 1
        thread.join()
    out = capsys.readouterr().out
    assert "zmqgrad doctor --listen on \\x1b]0;x\\x07" in out
    assert "\x1b" not in out


def test_a_listener_on_this_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ZMQGRAD_SECRET", SECRET)
    with listener(SECRET) as port:
        assert main(["doctor", "--peer", f"127.0.0.1:{port}", "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out[out.index("{") :])
    assert report["fit"] is True
    found = {check["name"]: check for check in report["checks"]}
    assert list(found) == [
        *("connect", "interface", "server", "secret", "NAT", "round trip", "back", "packets", "bandwidth")
    ]
    assert {check["status"] for check in found.values()} == {"ok"}
    assert found["connect"]["interface"] == "lo"
    assert found["round trip"]["round_trip_us"] > 0
    assert found["bandwidth"]["there_bytes_per_second"] > 0


@pytest.mark.parametrize(
    ("theirs", "ours", "found"),
    [(SECRET, SECRET[::-1], "another one"), (SECRET, "", "this host has"), (None, SECRET, "the peer has")],
)
def test_secrets_that_differ(
    theirs: str | None, ours: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ours:
        monkeypatch.setenv("ZMQGRAD_SECRET", ours)
    with listener(theirs) as port:
        checks = peer_checks("127.0.0.1", port)
    (secret,) = [check for check in checks if check.name == "secret"]
    assert secret.status is Status.BAD
    assert found in secret.found


def test_a_store_that_runs() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=10) as store:
        checks = peer_checks("localhost", store.port)
        assert store.num_keys() == 0, "nothing is left in it"
    statuses = by_name(checks)
    assert (statuses["server"], statuses["bandwidth"]) == (Status.OK, Status.OK)
    assert "a store of zmqgrad, with encryption (CURVE)" in str(checks)
    assert not checked_back(checks)
    assert "doctor --listen" in checks[-1].advice


def test_the_address_that_a_worker_would_choose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The listener connects to it, if the two share a secret: else it could be told to connect anywhere."""
    monkeypatch.setenv("ZMQGRAD_ADVERTISE_ADDRESS", "127.0.0.9")
    for secret, reached in ((None, "127.0.0.1"), (SECRET, "127.0.0.9")):
        if secret is not None:
            monkeypatch.setenv("ZMQGRAD_SECRET", secret)
        with listener(secret) as port:
            checks = {check.name: check for check in peer_checks("127.0.0.1", port)}
        assert "reached at 127.0.0.9" in checks["interface"].found
        assert f"{reached}:" in checks["back"].found
        assert f"127.0.0.1: connecting to {reached}: " in capsys.readouterr().out


def test_a_store_with_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQGRAD_SECRET", SECRET[::-1])
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=10, secret=SECRET) as store:
        assert by_name(peer_checks("127.0.0.1", store.port))["secret"] is Status.BAD


@contextmanager
def server(serve: Any) -> Iterator[int]:
    """A server that calls ``serve`` with each connection."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        stack.callback(thread.join)
        stack.callback(listening.shutdown, socket.SHUT_RDWR)
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    "sent",
    [b"SSH-2.0-OpenSSH\r\n", GREETING + b"[1]\n", GREETING + b"{}\n", GREETING + b"{\n", b"z", SLOW],
)
def test_a_foreign_server_is_reported(sent: bytes) -> None:
    with server(lambda connection: connection.sendall(sent)) as port:
        checks = peer_checks("127.0.0.1", port)
    assert len(checks) > 1
    assert checks[0].status is Status.OK


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert main(["doctor", "--peer", f"127.0.0.1:{port}"]) == 1
    out = capsys.readouterr().out
    assert "refused after" in out
    assert f"zmqgrad doctor --listen {port}" in out
    assert "workers cannot work together: see connect" in out


def test_a_name_that_nobody_knows() -> None:
    (check,) = peer_checks("no-such-host.invalid", 1)
    assert (check.name, check.status) == ("name", Status.BAD)


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, ""), TimeoutError(), OSError(113, "")])
def test_errors_are_told_apart(error: OSError) -> None:
    assert outcome_of(error) not in (Outcome.FAILED, Outcome.CONNECTED)


def test_the_port_of_a_listener_is_in_use() -> None:
    with listener() as port, pytest.raises(AddressInUseError, match=f"port {port}"):
        PeerListener("127.0.0.1", port, None)


@pytest.mark.parametrize(
    "line",
    [
        b"[]\n",
        b"x\n",
        b'{"answer": 1}\n',
        b"{}\n",
        b'{"answer": ""}\n{"read": -1}\n',
        b"[" * 4000 + b"\n",
        b'{"answer": ""}\n{"read": Infinity, "write": 0}\n',
    ],
)
def test_a_listener_survives_malformed_requests(line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with listener() as port:
        attempt = connect("127.0.0.1", port)
        assert attempt.stream is not None
        with attempt.stream as stream:
            stream.sendall(line)
            while stream.recv(4096):
                pass
        assert by_name(peer_checks("127.0.0.1", port))["bandwidth"] is Status.OK
    assert not capfd.readouterr().err


# ---- between hosts ---------------------------------------------------------------------------------------


@contextmanager
def listening(host: str) -> Iterator[None]:
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "zmqgrad", "doctor", "--listen", "29500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while "Stop with" not in process.stdout.readline():
                assert process.poll() is None
            yield
        finally:
            process.terminate()


def doctor(host: str, peer: str) -> dict[str, Any]:
    command = [
        "ip",
        "netns",
        "exec",
        host,
        sys.executable,
        "-m",
        "zmqgrad",
        "doctor",
        "--json",
        "--peer",
        peer,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.mark.processes
@pytest.mark.slow
def test_firewalls_and_an_mtu_that_is_too_small(networks: Networks) -> None:
    a, b = networks.add("a"), networks.add("b")
    networks.link(a, "eth0", b, "eth0", "10.213.30.", "fd00:213:30::")
    with listening(b):
        found = doctor(a, "[fd00:213:30::2]:29500")
        assert {check["status"] for check in found.values()} == {"ok", "warning"}, found
        assert doctor(a, "10.213.30.2:29501")["connect"]["outcome"] == "refused"
        networks.iptables(b, "-A INPUT -p tcp --dport 29502 -j DROP")
        networks.iptables(b, "-A INPUT -p tcp --dport 29503 -j REJECT --reject-with icmp-host-prohibited")
        assert doctor(a, "10.213.30.2:29502")["connect"]["outcome"] == "timed out"
        assert doctor(a, "10.213.30.2:29503")["connect"]["outcome"] == "unreachable"
        networks.iptables(a, "-A INPUT -p tcp --syn -j DROP")  # and only this way
        networks.iptables(b, "-I INPUT -p tcp -m length --length 1000: -j DROP")
        found = doctor(a, "10.213.30.2:29500")
        assert found["round trip"]["status"] == "ok"
        assert found["back"]["outcome"] == "timeout"
        assert (found["packets"]["status"], found["packets"]["lost"]) == ("bad", ["there"])


@pytest.mark.processes
@pytest.mark.slow
def test_a_nat_is_seen_from_behind_it(networks: Networks) -> None:
    a, r, b = networks.add("a"), networks.add("r"), networks.add("b")
    networks.link(a, "eth0", r, "in0", "10.213.40.")
    networks.link(r, "out0", b, "eth0", "10.213.41.")
    networks.run(r, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    networks.run(a, "ip", "route", "add", "default", "via", "10.213.40.2")
    networks.iptables(r, "-t nat -A POSTROUTING -o out0 -j MASQUERADE")
    with listening(b):
        found = doctor(a, "10.213.41.2:29500")
    assert "ZMQGRAD_ADVERTISE_ADDRESS=10.213.41.1 here" in found["NAT"]["advice"]
    assert found["back"]["status"] == "bad"


@pytest.mark.processes
@pytest.mark.slow
def test_the_chosen_interface_is_tested(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = networks.add("a"), networks.add("b")
    networks.link(a, "eth0", b, "eth0", "10.213.50.")
    networks.link(a, "ib0", b, "ib0", "10.213.51.")
    monkeypatch.setenv("ZMQGRAD_SECRET", SECRET)
    with listening(b):
        monkeypatch.setenv("ZMQGRAD_SOCKET_IFNAME", "ib")
        found = doctor(a, "10.213.50.2:29500")
        assert "listens at 10.213.51.1 (ib0, by ZMQGRAD_SOCKET_IFNAME=ib)" in found["interface"]["found"]
        assert "connects to 10.213.51.1:" in found["back"]["found"]
        monkeypatch.setenv("ZMQGRAD_SOCKET_IFNAME", "lo")
        found = doctor(a, "10.213.50.2:29500")
        assert found["interface"]["status"] == "bad"
        assert "meet at 10.213.50.2" in found["interface"]["advice"]
        assert "back" not in found
