"""Connections by TCP within a host."""

from __future__ import annotations

import errno
import select
import socket
from typing import Any

import pytest

from tests.simulation.network.conftest import World
from tests.simulation.network.test_unix import error_of

IN, OUT, ERR, HUP, RDHUP = select.POLLIN, select.POLLOUT, select.POLLERR, select.POLLHUP, select.POLLRDHUP
SECONDS = 5000


def opened(world: World) -> Any:
    return world.socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def listening(world: World) -> tuple[Any, tuple[str, int]]:
    listener = opened(world)
    listener.bind(("127.0.0.1", 0))
    listener.listen(10)
    return listener, listener.getsockname()


def connected(world: World) -> tuple[Any, Any]:
    listener, address = listening(world)
    one = opened(world)
    one.connect(address)
    two, peer = listener.accept()
    assert peer == one.getsockname()
    listener.close()
    return one, two


def test_names_and_bytes(world: World) -> None:
    one, two = connected(world)
    assert one.getpeername() == two.getsockname()
    assert one.getsockname()[0] == "127.0.0.1"
    assert world.ready(one, IN | OUT) == OUT
    one.sendall(b"some")
    one.send(b"thing")
    assert world.ready(two, IN, SECONDS) == IN
    assert two.recv(6) + two.recv(100) == b"something"
    one.setblocking(False)
    assert error_of(one.recv, 1) == errno.EAGAIN
    one.close()
    two.close()


def test_connecting_without_waiting(world: World) -> None:
    listener, address = listening(world)
    one = opened(world)
    one.setblocking(False)
    assert one.connect_ex(address) == errno.EINPROGRESS
    assert world.ready(one, OUT, SECONDS) == OUT
    assert one.connect_ex(address) in (0, errno.EISCONN)
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    listener.setblocking(False)
    assert world.ready(listener, IN, SECONDS) == IN
    listener.accept()[0].close()
    assert error_of(listener.accept) == errno.EAGAIN
    one.close()
    listener.close()


def test_a_refused_connection(world: World) -> None:
    listener, address = listening(world)
    listener.close()
    one = opened(world)
    assert one.connect_ex(address) == errno.ECONNREFUSED
    one.close()
    one = opened(world)
    one.setblocking(False)
    assert one.connect_ex(address) == errno.EINPROGRESS
    assert world.ready(one, IN, SECONDS) == IN | ERR | HUP
    assert error_of(one.recv, 1) == errno.ECONNREFUSED
    assert error_of(one.getpeername) == errno.ENOTCONN
    one.close()


def test_what_was_sent_arrives_before_the_end(world: World) -> None:
    one, two = connected(world)
    one.send(b"last")
    one.close()
    assert world.ready(two, RDHUP, SECONDS) == RDHUP
    assert [two.recv(10), two.recv(10)] == [b"last", b""]
    two.send(b"unwanted")  # the kernel of the other end resets the connection
    assert world.ready(two, 0, SECONDS) & (ERR | HUP)
    assert error_of(two.send, b"more") == errno.EPIPE
    two.close()


def test_bytes_left_unread_reset_the_connection(world: World) -> None:
    one, two = connected(world)
    one.send(b"unread")
    assert world.ready(two, IN, SECONDS)
    two.close()
    assert world.ready(one, IN, SECONDS) & ERR
    assert error_of(one.recv, 10) == errno.ECONNRESET
    assert one.recv(10) == b""
    assert error_of(one.send, b"more") == errno.EPIPE
    assert error_of(one.getpeername) == errno.ENOTCONN
    one.close()


def test_half_of_a_connection(world: World) -> None:
    one, two = connected(world)
    one.shutdown(socket.SHUT_WR)
    assert error_of(one.send, b"x") == errno.EPIPE
    assert world.ready(two, IN, SECONDS) == IN
    assert two.recv(10) == b""
    two.send(b"reply")
    assert world.ready(one, IN, SECONDS) == IN
    assert one.recv(10) == b"reply"
    two.close()
    assert world.ready(one, IN, SECONDS) & (IN | HUP) == IN | HUP
    assert one.recv(10) == b""
    one.close()


def test_shutting_down_both_halves(world: World) -> None:
    one, two = connected(world)
    copy = world.socket.socket(fileno=world.os.dup(one.fileno()))
    assert (copy.family, copy.type) == (socket.AF_INET, socket.SOCK_STREAM)
    copy.shutdown(socket.SHUT_RDWR)
    copy.close()
    assert one.recv(1) == b""
    assert world.ready(two, IN, SECONDS) == IN
    assert two.recv(1) == b""
    one.close()
    two.close()


def test_a_port_that_is_in_use(world: World) -> None:
    listener, address = listening(world)
    other = opened(world)
    assert error_of(other.bind, address) == errno.EADDRINUSE
    listener.close()
    other.close()


def test_a_listener_that_ends_resets_those_who_wait(world: World) -> None:
    listener, address = listening(world)
    one = opened(world)
    one.connect(address)
    listener.close()
    assert world.ready(one, IN, SECONDS) & ERR
    assert error_of(one.recv, 10) == errno.ECONNRESET
    one.close()


def test_what_is_not_connected(world: World) -> None:
    one = opened(world)
    assert error_of(one.send, b"x") == errno.EPIPE
    assert error_of(one.recv, 1) == errno.ENOTCONN
    assert world.ready(one, IN | OUT) == OUT | HUP
    assert error_of(one.shutdown, socket.SHUT_RDWR) == errno.ENOTCONN
    one.close()


def test_looking_up_names(world: World) -> None:
    assert world.socket.getaddrinfo("127.0.0.1", None, socket.AF_INET, socket.SOCK_STREAM)[0][4] == (
        "127.0.0.1",
        0,
    )
    assert world.socket.getaddrinfo("localhost", 80, socket.AF_INET)[0][4] == ("127.0.0.1", 80)
    with pytest.raises(socket.gaierror):
        world.socket.getaddrinfo("no.such.host.invalid", None)


def test_reading_lines_after_the_socket_was_closed(world: World) -> None:
    one, two = connected(world)
    lines = one.makefile("rb")
    one.close()
    two.send(b"first\nsecond\nrest")
    assert [lines.readline(), lines.readline()] == [b"first\n", b"second\n"]
    lines.close()
    assert one.fileno() == -1
    two.close()
