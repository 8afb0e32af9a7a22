"""Which of a peer's addresses is taken."""

from __future__ import annotations

import os
import re
import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from tests.support.interpreter import run_python
from zmqgrad.errors import TransportError, UnknownPeerError
from zmqgrad.transport.bind_policy import bind
from zmqgrad.transport.connections import best_endpoint
from zmqgrad.transport.local.descriptors import abstract_endpoint, check_can_accept

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


WITHOUT_DESCRIPTORS = """
import resource, sys, zmq
from zmqgrad.transport.local import abstract_endpoint
context = zmq.Context()
router = context.socket(zmq.ROUTER)
endpoint = abstract_endpoint("test")
router.bind(endpoint)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
print(endpoint, flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
print("raised", flush=True)
print(router.recv_multipart()[1].decode())
context.destroy()
"""


@pytest.mark.processes
def test_a_process_without_descriptors_is_not_connected_to() -> None:
    """libzmq would abort it. With descriptors it is reached again."""
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            endpoint = process.stdout.readline().strip()
            for _ in range(3):
                with pytest.raises(TransportError, match=f"process {process.pid}, .* of 3 .*ulimit -n"):
                    best_endpoint([endpoint, TCP])
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "raised\n"
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.connect(best_endpoint([endpoint, TCP]))
                dealer.send(b"hello")
                assert process.stdout.readline() == "hello\n"
        finally:
            process.kill()


ALMOST_WITHOUT = """
import os, resource, sys
from zmqgrad.errors import TransportError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.mailbox import ZmqMailbox
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
used = len(os.listdir("/proc/self/fd")) - 1
for free in range(0, 60, 3):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
    try:
        mailbox = ZmqMailbox("w0", 0)
        mailbox.close()
        assert mailbox.join(Deadline.after(10)) == []
        print("opened")
    except TransportError as e:
        print("refused", e)
"""


@pytest.mark.processes
def test_a_mailbox_opens_all_its_sockets_or_none() -> None:
    """libzmq aborts the process if it has a few descriptors, but not enough."""
    lines = run_python(ALMOST_WITHOUT, timeout=60.0).splitlines()
    assert [line.split()[0] for line in lines] == sorted((line.split()[0] for line in lines), reverse=True)
    assert lines[-1] == "opened"
    assert re.fullmatch("refused w0 cannot open its sockets: .*", lines[0])


def test_nothing_is_bound_without_descriptors() -> None:
    """libzmq would abort the process: it cannot list the network interfaces."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(TransportError, match=r"cannot listen on tcp://.*: Too many open files"):
                bind(router, "tcp://127.0.0.1:*")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert bind(router, "tcp://127.0.0.1:*").startswith("tcp://127.0.0.1:")


def test_an_endpoint_names_its_process() -> None:
    """A process that does not exist here, or an endpoint of another form, says nothing about descriptors."""
    check_can_accept(abstract_endpoint("test"))
    check_can_accept("ipc://@zmqgrad-test-4194305-00")
    check_can_accept("ipc:///tmp/zmqgrad-1/socket")


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
