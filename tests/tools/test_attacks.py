"""Attacks on a running job: none succeeds, and each would where its door is open."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tools.attacks import attempts
from tools.attacks.attempts import Target
from tools.ports import free_port
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.store import StoreServer, TCPStore
from zmqgrad.transport import local
from zmqgrad.transport.heartbeat import HeartbeatListener, HeartbeatMonitor
from zmqgrad.transport.local import LocalListener
from zmqgrad.transport.user_token import read_token

SECONDS = 240


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="attackers are other users")
def test_no_attack_succeeds() -> None:
    assert "36 attacks tried, 0 succeeded" in run("--quick")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="attackers are other users")
def test_a_flood_costs_no_call_and_no_memory() -> None:
    """A small one: a million frames take minutes."""
    assert ", 0 succeeded" in run("--flood", "300", "600")


def run(*options: str) -> str:
    command = [sys.executable, "-m", "tools.attacks", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def target(ports: tuple[int, ...] = (), names: tuple[str, ...] = (), path: str = "/nowhere") -> Target:
    return Target(ports, names, path, "/nowhere/marker", "/nowhere/progress")


def test_a_store_without_authentication_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", "1")
    watched = free_port()
    with closing(StoreServer("tcp://127.0.0.1:*", watch_port=watched)) as server:
        with TCPStore("127.0.0.1", server.port, timeout=20) as store:
            store.set("password", "in the open")
        assert "in the open" in attempts.read_the_store(target((server.port,)))
        assert f":{watched}" in attempts.subscribe(target((watched,)))


def test_a_listener_with_a_key_that_everybody_knows_replies(tmp_path: Path) -> None:
    endpoint, poll = local.abstract_endpoint("test"), select.poll()
    listener = LocalListener(endpoint, poll, b"", 0, lambda seconds, job: None)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for fd, _ in poll.poll(10):
                listener.read(fd)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert "replied" in attempts.run_code_by_unix_socket(target(names=(endpoint[len("ipc://") :],)))
    finally:
        stop.set()
        reader.join()
        listener.close()


def test_heartbeats_with_a_key_that_everybody_knows_are_returned() -> None:
    service = ServiceThread("w")
    service.start()
    name = f"@zmqgrad-{os.getpid()}-test"
    listener = HeartbeatListener(f"ipc://{name}", None)
    monitor = HeartbeatMonitor("w", listener, service, lambda *_: None, lambda *_: None)
    try:
        assert attempts.pass_for_a_peer(target(names=(f"{name}-heartbeat",)))
    finally:
        monitor.close()
        assert monitor.join(Deadline.after(20))
        service.close()
        assert service.join(Deadline.after(20)) == []


def test_a_token_that_others_can_read_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    read_token()
    assert "32 bytes" in attempts.take_the_token(target(path=str(tmp_path / "zmqgrad" / "token")))
