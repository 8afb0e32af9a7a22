"""What kind of server is there: every kind, from real sockets."""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tools.ports import free_port
from zmqgrad.interop.probe import HTTP_REQUEST, Probe, Server
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import TCPStore

WAIT = 20.0


@contextmanager
def replies(reply: bytes | None) -> Iterator[int]:
    """A server that answers the first bytes of one client with ``reply``; None: it closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                if reply is not None:
                    connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(WAIT)


def test_a_store_of_zmqgrad_greets() -> None:
    with (
        TCPStore("127.0.0.1", 0, is_master=True) as store,
        Probe("127.0.0.1", store.port, Deadline.after(WAIT)) as probe,
    ):
        assert probe.identify(WAIT) is Server.ZEROMQ


@pytest.mark.parametrize(
    ("reply", "kind"),
    [(b"HTTP/1.0 400 Bad Request\r\n", Server.HTTP), (b"SSH-2.0", Server.OTHER), (None, None), (b"", None)],
)
def test_other_servers_are_asked(reply: bytes | None, kind: Server | None) -> None:
    with replies(reply) as port, Probe("127.0.0.1", port, Deadline.after(WAIT)) as probe:
        assert probe.identify(0.0) is None, "it waits for the client to begin"
        assert probe.identify(WAIT, HTTP_REQUEST) is kind


def test_a_connection_that_is_reset_at_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, ends = socket.create_connection, []

    def connect_and_reset(*address: Any) -> socket.socket:
        made = connect(*address)
        ends.append(server.accept()[0])
        if len(ends) == 1:
            ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            ends[0].close()
            assert select.select([made], [], [], WAIT)[0]
        return made

    monkeypatch.setattr(socket, "create_connection", connect_and_reset)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with Probe("127.0.0.1", server.getsockname()[1], Deadline.after(WAIT)):
            assert len(ends) == 2
        ends[1].close()


def test_a_server_that_starts_late_is_waited_for() -> None:
    port = free_port()
    late = threading.Timer(0.1, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
    servers: list[socket.socket] = []
    late.start()
    with Probe("127.0.0.1", port, Deadline.after(WAIT)) as probe:
        assert probe.identify(0.01) is None
    late.join()
    servers[0].close()


def test_where_nothing_listens() -> None:
    with pytest.raises(ConnectionRefusedError):
        Probe("127.0.0.1", free_port(), Deadline.after(0.05))
    with pytest.raises(OSError, match=r"not known|resolution"):
        Probe("no.such.host.invalid", 1, Deadline.after(0.05))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EHOSTUNREACH, "no route"), OSError(errno.ENETUNREACH, ""), socket.gaierror(-2, "")],
)
def test_a_host_that_starts_late_is_waited_for(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, nobody answers for its address, no route leads there, or its name is not known."""
    connect, errors = socket.create_connection, [error]

    def connect_later(*address: Any) -> socket.socket:
        if errors:
            raise errors.pop()
        return connect(*address)

    monkeypatch.setattr(socket, "create_connection", connect_later)
    with socket.create_server(("127.0.0.1", 0)) as server:
        Probe("127.0.0.1", server.getsockname()[1], Deadline.after(WAIT)).__exit__()
