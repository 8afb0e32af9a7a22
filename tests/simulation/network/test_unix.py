"""Unix sockets, and the descriptors that a process waits for."""

from __future__ import annotations

import array
import errno
import select
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.network.conftest import World

IN, OUT, ERR, HUP, RDHUP = select.POLLIN, select.POLLOUT, select.POLLERR, select.POLLHUP, select.POLLRDHUP
NOW = socket.MSG_DONTWAIT
KINDS = pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])


def opened(world: World, kind: int = socket.SOCK_SEQPACKET) -> Any:
    return world.socket.socket(socket.AF_UNIX, kind)


def listening(world: World, backlog: int = 10, kind: int = socket.SOCK_SEQPACKET) -> tuple[Any, str]:
    name, listener = world.name(), opened(world, kind)
    listener.bind(name)
    listener.listen(backlog)
    return listener, name


def connected(world: World, kind: int = socket.SOCK_SEQPACKET) -> tuple[Any, Any]:
    listener, name = listening(world, kind=kind)
    one = opened(world, kind)
    one.connect(name)
    two, _ = listener.accept()
    listener.close()
    return one, two


def error_of(call: Any, *args: Any) -> int:
    try:
        call(*args)
    except OSError as e:
        return int(e.errno or 0)
    return 0


def test_packets_keep_their_bounds(world: World) -> None:
    one, two = connected(world)
    with one, two:
        one.send(b"first")
        one.send(b"second")
        assert two.recv(100) == b"first"
        assert two.recv(3) == b"sec"  # the rest is lost
        assert error_of(two.recv, 10, NOW) == errno.EAGAIN


def test_a_stream_has_no_bounds(world: World) -> None:
    one, two = connected(world, socket.SOCK_STREAM)
    with one, two:
        one.send(b"first")
        one.sendall(b"second")
        assert two.recv(8) == b"firstsec"
        assert two.recv(8) == b"ond"


def test_a_look_takes_nothing(world: World) -> None:
    one, two = connected(world)
    with one, two:
        one.send(b"data")
        assert two.recv(10, socket.MSG_PEEK) == two.recv(10, NOW) == b"data"


@KINDS
def test_what_was_sent_can_be_read_after_the_end(world: World, kind: int) -> None:
    one, two = connected(world, kind)
    one.send(b"last")
    one.close()
    assert world.ready(two, IN | OUT | RDHUP) & (IN | HUP | RDHUP) == IN | HUP | RDHUP
    assert [two.recv(10), two.recv(10), two.recv(10)] == [b"last", b"", b""]
    assert error_of(two.send, b"more") == errno.EPIPE
    two.close()


def test_packets_that_were_left_unread_are_reported_first_and_once(world: World) -> None:
    one, two = connected(world)
    two.send(b"reply")
    one.send(b"unread")
    two.close()
    assert world.ready(one, IN) & ERR
    assert error_of(one.recv, 10) == errno.ECONNRESET
    assert [one.recv(10), one.recv(10)] == [b"reply", b""]
    one.close()


def test_bytes_that_were_left_unread_are_reported_last(world: World) -> None:
    one, two = connected(world, socket.SOCK_STREAM)
    two.send(b"reply")
    one.send(b"unread")
    two.close()
    assert one.recv(10) == b"reply"
    assert error_of(one.recv, 10) == errno.ECONNRESET
    assert one.recv(10) == b""
    one.close()


@KINDS
def test_a_send_to_an_end_that_left_packets_unread(world: World, kind: int) -> None:
    one, two = connected(world, kind)
    one.send(b"unread")
    two.close()
    if kind == socket.SOCK_SEQPACKET:
        assert error_of(one.send, b"more") == errno.ECONNRESET
    assert error_of(one.send, b"more") == errno.EPIPE
    one.close()


def test_sending_before_being_accepted(world: World) -> None:
    listener, name = listening(world)
    one = opened(world)
    one.connect(name)
    one.send(b"early")
    one.close()
    two, _ = listener.accept()
    assert [two.recv(10), two.recv(10)] == [b"early", b""]
    two.close()
    listener.close()


def test_a_listener_that_ends_resets_those_who_wait(world: World) -> None:
    listener, name = listening(world)
    one = opened(world)
    one.connect(name)
    listener.close()
    assert error_of(one.recv, 10) == errno.ECONNRESET
    assert one.recv(10) == b""
    assert error_of(one.send, b"x") == errno.EPIPE
    one.close()


def test_names(world: World, tmp_path: Path) -> None:
    one = opened(world)
    assert one.connect_ex(world.name()) == errno.ECONNREFUSED
    assert one.connect_ex(str(tmp_path / "none")) == errno.ENOENT
    listener, name = listening(world)
    with opened(world) as other:
        assert error_of(other.bind, name) == errno.EADDRINUSE
    listener.close()
    assert one.connect_ex(name) == errno.ECONNREFUSED
    again = opened(world)
    again.bind(name)
    assert one.connect_ex(name) == errno.ECONNREFUSED  # it does not listen yet
    again.listen(1)
    one.connect(name)
    assert error_of(one.connect, name) == errno.EISCONN
    assert one.getpeername() == name.encode()
    again.close()
    one.close()


def test_the_backlog_is_one_more(world: World) -> None:
    listener, name = listening(world, backlog=1)
    waiting = [opened(world) for _ in range(3)]
    for one in waiting:
        one.setblocking(False)
    assert [one.connect_ex(name) for one in waiting] == [0, 0, errno.EAGAIN]
    listener.accept()[0].close()
    assert waiting[2].connect_ex(name) == 0
    for one in (listener, *waiting):
        one.close()


def test_connecting_waits_for_room_as_long_as_the_option_says(world: World) -> None:
    listener, name = listening(world, backlog=0)
    one, two = opened(world), opened(world)
    one.connect(name)
    two.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 20_000))
    assert error_of(two.connect, name) == errno.EAGAIN
    for end in (one, two, listener):
        end.close()


def test_receiving_waits_as_long_as_the_option_says(world: World) -> None:
    one, two = connected(world)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 20_000))
    assert error_of(one.recv, 10) == errno.EAGAIN
    one.settimeout(0.01)
    with pytest.raises(TimeoutError):
        one.recv(10)
    one.close()
    two.close()


@KINDS
def test_a_full_buffer_accepts_no_more_until_three_quarters_were_read(world: World, kind: int) -> None:
    one, two = connected(world, kind)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 212_992)
    one.setblocking(False)
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 212_992
    sent = 0
    while one.send(b"x" * 100) and world.ready(one, OUT):
        sent += 1
    while True:
        try:
            one.send(b"x" * 100)
            sent += 1
        except BlockingIOError:
            break
    assert 500 < sent + 1 < 600  # zmqgrad counts on hundreds
    two.recv(100)
    assert not world.ready(one, OUT)
    one.send(b"x" * 100)  # though there is room for one
    for _ in range(sent * 4 // 5):
        two.recv(100)
    assert world.ready(one, OUT)
    one.close()
    two.close()


def test_credentials_are_those_of_the_listener_and_of_who_connected(world: World) -> None:
    one, two = connected(world)
    for end in (one, two, *world.socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)):
        pid, _, _ = struct.unpack("@3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        assert pid == world.pid
        end.close()


def test_shutting_down(world: World) -> None:
    one, two = connected(world)
    two.send(b"before")
    one.shutdown(socket.SHUT_RD)
    assert error_of(two.send, b"after") == errno.EPIPE
    assert [one.recv(10), one.recv(10)] == [b"before", b""]
    one.send(b"still")
    one.shutdown(socket.SHUT_RDWR)
    assert [two.recv(10), two.recv(10)] == [b"still", b""]
    assert error_of(one.send, b"x") == errno.EPIPE
    one.close()
    two.close()


def test_what_is_not_connected(world: World) -> None:
    one = opened(world)
    assert error_of(one.send, b"x") == errno.ENOTCONN
    assert error_of(one.recv, 1) == errno.ENOTCONN
    assert error_of(one.getpeername) == errno.ENOTCONN
    assert world.ready(one, IN | OUT) == OUT | HUP
    one.close()
    assert error_of(one.recv, 1) == errno.EBADF
    assert one.fileno() == -1


def test_a_descriptor_is_sent(world: World) -> None:
    one, two = connected(world)
    reads, writes = world.os.pipe()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writes]))]
    one.sendmsg([b"take", b" it"], rights)
    world.os.close(writes)
    for flags in (socket.MSG_PEEK, 0):
        data, ancillary, found, _ = two.recvmsg(100, socket.CMSG_LEN(4), flags | NOW)
        assert data == b"take it"
        assert not found & socket.MSG_CTRUNC
        ((_, _, raw),) = ancillary
        (fd,) = struct.unpack("@i", raw)
        world.os.write(fd, b"!")
        world.os.close(fd)
        assert world.os.read(reads, 10) == b"!"
    assert world.os.read(reads, 10) == b""  # nobody has the other end
    world.os.close(reads)
    one.close()
    two.close()


def test_a_descriptor_that_nobody_takes_is_closed(world: World) -> None:
    one, two = connected(world)
    reads, writes = world.os.pipe()
    for _ in range(2):
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("@i", writes))])
    world.os.close(writes)
    assert two.recv(10) == b"x"
    assert not world.ready(reads, IN)
    two.close()
    assert world.ready(reads, IN) & HUP
    world.os.close(reads)
    one.close()


def test_eventfd(world: World) -> None:
    fd = world.os.eventfd(0, 0o4000)
    assert world.ready(fd, IN | OUT) == OUT
    assert error_of(world.os.read, fd, 8) == errno.EAGAIN
    world.os.eventfd_write(fd, 2)
    world.os.write(fd, (3).to_bytes(8, "little"))
    assert world.ready(fd, IN) == IN
    assert world.os.eventfd_read(fd) == 5
    assert not world.ready(fd, IN)
    world.os.close(fd)
    assert error_of(world.os.close, fd) == errno.EBADF


def test_pipe(world: World) -> None:
    reads, writes = world.os.pipe()
    world.os.set_blocking(reads, False)
    assert error_of(world.os.read, reads, 1) == errno.EAGAIN
    world.os.write(writes, b"abc")
    assert world.ready(reads, IN) == IN
    assert [world.os.read(reads, 2), world.os.read(reads, 2)] == [b"ab", b"c"]
    copy = world.os.dup(writes)
    world.os.close(writes)
    assert error_of(world.os.read, reads, 1) == errno.EAGAIN
    world.os.close(copy)
    assert world.ready(reads, IN) == HUP
    assert world.os.read(reads, 1) == b""
    world.os.close(reads)


def test_the_lowest_free_descriptor_is_used_again(world: World) -> None:
    one, two = opened(world), opened(world)
    number = one.fileno()
    one.close()
    three = opened(world)
    assert three.fileno() == number
    world.os.dup2(two.fileno(), number)
    assert world.os.fstat(number).st_ino == world.os.fstat(two.fileno()).st_ino
    three.close()
    two.close()


def test_epoll(world: World) -> None:
    epoll, fd = world.select.epoll(), world.os.eventfd(0, 0o4000)
    epoll.register(fd, IN)
    assert error_of(epoll.register, fd, IN) == errno.EEXIST
    assert epoll.poll(0) == []
    assert epoll.poll(0.001, 1) == []
    world.os.eventfd_write(fd, 1)
    assert epoll.poll(None, 1) == epoll.poll(0) == [(fd, IN)]
    epoll.modify(fd, OUT)
    assert epoll.poll(0) == [(fd, OUT)]
    epoll.unregister(fd)
    assert error_of(epoll.unregister, fd) == errno.ENOENT
    epoll.register(fd, IN)
    world.os.close(fd)
    assert epoll.poll(0) == []  # it left with its last descriptor
    epoll.close()
    with pytest.raises(ValueError, match="closed"):
        epoll.poll(0)
    epoll.close()
    assert epoll.closed


def test_a_nested_epoll_that_reports_once(world: World) -> None:
    inner, outer, fd = world.select.epoll(), world.select.epoll(), world.os.eventfd(0, 0o4000)
    inner.register(fd, IN)
    outer.register(inner.fileno(), IN | select.EPOLLONESHOT)
    assert outer.poll(0) == []
    world.os.eventfd_write(fd, 1)
    assert outer.poll(1) == [(inner.fileno(), IN)]
    assert outer.poll(0) == []
    outer.modify(inner.fileno(), IN | select.EPOLLONESHOT)
    assert outer.poll(0) == [(inner.fileno(), IN)]
    outer.modify(inner.fileno(), select.EPOLLONESHOT)
    assert outer.poll(0) == []
    for epoll in (inner, outer):
        epoll.close()
    world.os.close(fd)


def test_poll(world: World) -> None:
    poll, (one, two) = world.select.poll(), connected(world)
    poll.register(one, IN)
    poll.register(two.fileno(), IN | OUT)
    assert poll.poll(0) == [(two.fileno(), OUT)]
    one.send(b"x")
    assert poll.poll(10) == [(two.fileno(), IN | OUT)]
    poll.modify(two.fileno(), IN)
    poll.unregister(two)
    assert poll.poll(1) == []
    with pytest.raises(KeyError):
        poll.unregister(two)
    fd = one.fileno()
    one.close()
    assert poll.poll(None) == [(fd, select.POLLNVAL)]
    two.close()
