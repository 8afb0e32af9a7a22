"""Which of a peer's addresses is taken."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import sys
from collections.abc import Iterator

import pytest

from zmqgrad.errors import TransportError, UnknownPeerError
from zmqgrad.transport.connections import best_endpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="addresses without a file are Linux's")

TCP = "tcp://127.0.0.1:9"
NOBODY = 65534


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind("\0zmqgrad-test-" + secrets.token_hex(8))
        yield listening


def ipc(listening: socket.socket) -> str:
    return "ipc://@" + listening.getsockname()[1:].decode()


def test_ipc_with_a_listener(listener: socket.socket) -> None:
    assert best_endpoint([ipc(listener), TCP]) == TCP
    with pytest.raises(UnknownPeerError, match="can be reached"):
        best_endpoint([ipc(listener)])
    listener.listen()
    assert best_endpoint([ipc(listener), TCP]) == ipc(listener)
    assert best_endpoint(["heartbeat://127.0.0.1:9/00", TCP]) == TCP


def test_a_process_without_descriptors_says_so(listener: socket.socket) -> None:
    listener.listen()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(TransportError, match=r"cannot open a socket to ipc://@.*: Too many open files"):
            best_endpoint([ipc(listener), TCP])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert best_endpoint([ipc(listener), TCP]) == ipc(listener)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_a_peer_of_another_user_is_reached_by_tcp(listener: socket.socket) -> None:
    """It would take the connection, and hang up as soon as it saw whose it is: calls would wait in vain."""
    os.seteuid(NOBODY)
    try:
        listener.listen()
    finally:
        os.seteuid(0)
    assert best_endpoint([ipc(listener), TCP]) == TCP


def test_peers_of_another_user_use_tcp(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    listener.listen()
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert best_endpoint([ipc(listener), TCP]) == TCP
