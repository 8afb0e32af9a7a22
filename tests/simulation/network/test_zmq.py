"""ZeroMQ as zmqgrad uses it: ROUTER, DEALER, XPUB and SUB over tcp, and the monitors of those."""

from __future__ import annotations

import errno
import select
import socket as sockets
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.simulation.network.conftest import World
from tests.simulation.network.zmq_sockets import SECONDS, Sockets

ACCEPTED, CONNECTED, CLOSED = zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED, zmq.EVENT_CLOSED
DISCONNECTED, LISTENING = zmq.EVENT_DISCONNECTED, zmq.EVENT_LISTENING
READY = zmq.EVENT_HANDSHAKE_SUCCEEDED
NEVER = -1


@pytest.fixture
def net(world: World) -> Iterator[Sockets]:
    """The sockets of a test."""
    opened = Sockets(world)
    yield opened
    opened.close()


def error_of(call: Callable[..., Any], *args: Any) -> int:
    """Returns the errno with which ``call`` fails; 0 if it does not."""
    try:
        call(*args)
    except zmq.ZMQError as e:
        return e.errno or 0
    return 0


def send(socket: Any, *frames: bytes) -> None:
    """Sends a message, without waiting."""
    for frame in frames[:-1]:
        socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
    socket.send(frames[-1], zmq.NOBLOCK)


def fill(socket: Any, *frames: bytes) -> tuple[int, int]:
    """Sends until that fails. Returns how many it took, and the errno."""
    for count in range(100_000):
        failed = error_of(send, socket, *frames)
        if failed:
            return count, failed
    raise AssertionError("there is no limit")


def give_up(net: Sockets, socket: Any, address: str) -> None:
    """Gives up the address of ``socket``, and returns when nobody has it: closing does not wait for that.

    The connections there end when the thread that reads the socket has seen it.
    """
    monitor = net.watch(socket, CLOSED)
    socket.unbind(address)
    assert monitor.next()[0] == CLOSED
    monitor.close()
    net.discard(socket)


# ---- messages -------------------------------------------------------------------------------------------


def test_messages_keep_their_order_and_frames(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    dealer = net.connected(zmq.DEALER, address)
    for number in range(20):
        send(dealer, b"%d" % number, b"", b"frame")
    identities = set()
    for number in range(20):
        identity, *frames = net.receive(router)
        identities.add(identity)
        assert frames == [b"%d" % number, b"", b"frame"]
    assert len(identities) == 1


def test_a_reply_reaches_the_one_who_asked(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    dealers = [net.connected(zmq.DEALER, address) for _ in range(3)]
    for number, dealer in enumerate(dealers):
        send(dealer, b"%d" % number)
    for _ in dealers:
        identity, text = net.receive(router)
        assert len(identity) == 5
        assert identity[0] == 0
        send(router, identity, b"reply to " + text)
    for number, dealer in enumerate(dealers):
        assert net.receive(dealer) == [b"reply to %d" % number]


def test_messages_sent_before_anybody_listens_arrive(net: Sockets) -> None:
    port = net.unused_port()
    dealer = net.connected(zmq.DEALER, f"tcp://127.0.0.1:{port}", reconnect_ivl=10)
    send(dealer, b"early")
    net.pause()
    router = net.open(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    assert net.receive(router)[1:] == [b"early"]


def test_frames_come_one_at_a_time_too(net: Sockets) -> None:
    router, identity, dealer = net.pair()
    send(dealer, b"first", b"second")
    while not router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        assert net.wait(router.getsockopt(zmq.FD))
    assert router.recv() == identity
    assert router.getsockopt(zmq.RCVMORE)
    frame = router.recv(copy=False)
    assert (frame.bytes, frame.more, len(frame)) == (b"first", True, 5)
    assert router.getsockopt(zmq.RCVMORE)
    frame = router.recv(copy=False)
    assert (frame.bytes, frame.more) == (b"second", False)
    assert not router.getsockopt(zmq.RCVMORE)
    assert error_of(router.recv, zmq.NOBLOCK) == errno.EAGAIN


def test_what_arrives_is_writable_and_its_own(net: Sockets) -> None:
    router, _, dealer = net.pair()
    sent = bytearray(b"x" * 1000)
    dealer.send(sent, zmq.NOBLOCK, copy=True)
    sent[:3] = b"abc"
    frame = net.receive_frames(router)[1]
    buffer = frame.buffer
    assert bytes(buffer) == b"x" * 1000
    buffer[:3] = b"new"
    assert bytes(frame.buffer[:4]) == b"newx"


def test_large_frames_arrive_whole(net: Sockets) -> None:
    router, _, dealer = net.pair()
    data = bytes(range(256)) * 4096
    dealer.send(memoryview(data), zmq.NOBLOCK | zmq.SNDMORE, copy=False)
    dealer.send(data, zmq.NOBLOCK, copy=False)
    _, *frames = net.receive(router)
    assert frames == [data, data]


def test_a_blocking_receive_waits(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    dealer = net.connected(zmq.DEALER, address)
    send(dealer, b"text")
    assert router.recv_multipart()[1:] == [b"text"]
    router.rcvtimeo = 20
    assert error_of(router.recv) == errno.EAGAIN


# ---- the descriptor -------------------------------------------------------------------------------------


def test_the_descriptor_reports_what_comes_after_an_empty_read(net: Sockets) -> None:
    router, _, dealer = net.pair()
    fd = router.getsockopt(zmq.FD)
    assert net.is_empty(router)
    send(dealer, b"one")
    assert net.wait(fd)
    assert net.wait(fd, 0)  # as long as nobody has looked
    assert router.getsockopt(zmq.EVENTS) & zmq.POLLIN
    assert not net.wait(fd, 0)  # looking takes the event, though the message waits
    assert router.getsockopt(zmq.EVENTS) & zmq.POLLIN
    send(dealer, b"two")
    assert not net.wait(fd, 50)  # nobody has found the socket empty since
    assert net.receive(router)[1:] == [b"one"]
    assert net.receive(router)[1:] == [b"two"]
    assert error_of(router.recv, zmq.NOBLOCK) == errno.EAGAIN
    send(dealer, b"three")
    assert net.wait(fd)


def test_the_descriptor_stays_the_same(net: Sockets) -> None:
    router, _ = net.bound(zmq.ROUTER)
    assert router.getsockopt(zmq.FD) == router.getsockopt(zmq.FD) >= 0


def test_a_dealer_can_always_send_without_a_limit(net: Sockets) -> None:
    dealer = net.connected(zmq.DEALER, f"tcp://127.0.0.1:{net.unused_port()}", sndhwm=0)
    for _ in range(3000):
        send(dealer, b"text")
    assert dealer.getsockopt(zmq.EVENTS) & zmq.POLLOUT


# ---- limits ---------------------------------------------------------------------------------------------


def test_a_dealer_refuses_what_is_above_its_limit(net: Sockets) -> None:
    dealer = net.connected(zmq.DEALER, f"tcp://127.0.0.1:{net.unused_port()}", sndhwm=7)
    assert fill(dealer, b"first", b"second") == (7, errno.EAGAIN)
    assert not dealer.getsockopt(zmq.EVENTS) & zmq.POLLOUT


def test_a_dealer_without_a_peer_cannot_send(net: Sockets) -> None:
    assert error_of(send, net.open(zmq.DEALER), b"text") == errno.EAGAIN


def test_a_reply_to_nobody_is_an_error_if_mandatory(net: Sockets) -> None:
    router, identity, _ = net.pair(router_mandatory=True)
    assert error_of(send, router, b"nobody", b"text") == errno.EHOSTUNREACH
    send(router, identity, b"text")  # it can go on
    router, _ = net.bound(zmq.ROUTER)
    send(router, b"nobody", b"text")  # else it is dropped


def test_a_client_that_does_not_read_is_full_in_the_end(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER, router_mandatory=True, sndhwm=10)
    dealer = net.connected(zmq.DEALER, address, rcvhwm=1)
    send(dealer, b"hello")
    identity, _ = net.receive(router)
    count, failed = 0, 0
    data = bytes(1 << 20)
    while not failed and count < 500:
        failed = error_of(send, router, identity, data)
        count += 1
        if failed:  # unless libzmq was only slower than this
            net.pause(100)
            failed = error_of(send, router, identity, data)
    assert failed == errno.EAGAIN
    for _ in range(11):  # it takes some, so there is room again
        assert net.receive(dealer) == [data]
    net.pause()
    send(router, identity, b"text")


def test_a_frame_above_the_limit_ends_the_connection(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER, maxmsgsize=1000)
    monitor = net.watch(router, DISCONNECTED)
    dealer = net.connected(zmq.DEALER, address, reconnect_ivl=NEVER)
    send(dealer, bytes(1000))
    assert len(net.receive(router)[1]) == 1000
    send(dealer, bytes(1001))
    assert monitor.next()[0] == DISCONNECTED
    assert net.is_empty(router)


# ---- the end of a connection ----------------------------------------------------------------------------


def test_what_was_sent_arrives_before_the_end(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER, router_mandatory=True)
    monitor = net.watch(router, DISCONNECTED)
    dealer = net.connected(zmq.DEALER, address)
    for number in range(50):
        send(dealer, b"%d" % number)
    dealer.close(linger=5000)
    assert monitor.next()[0] == DISCONNECTED
    for number in range(50):
        identity, text = net.receive(router)
        assert text == b"%d" % number
    assert net.is_empty(router)  # a socket that sends need not have noticed the end before
    assert error_of(send, router, identity, b"text") == errno.EHOSTUNREACH


def test_connections_are_read_in_turn(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    monitor = net.watch(router, DISCONNECTED)
    for _ in range(2):
        dealer = net.connected(zmq.DEALER, address)
        for number in range(5):
            send(dealer, b"%d" % number)
        dealer.close(linger=5000)
    assert monitor.kinds(2) == [DISCONNECTED] * 2  # so everything has arrived
    received = [net.receive(router) for _ in range(10)]
    assert [text for _, text in received] == [b"%d" % (n // 2) for n in range(10)]
    assert len({identity for identity, _ in received}) == 2


def test_nothing_lingers_if_told_so(net: Sockets) -> None:
    port = net.unused_port()
    dealer = net.connected(zmq.DEALER, f"tcp://127.0.0.1:{port}", reconnect_ivl=10)
    send(dealer, b"text")
    dealer.close(linger=0)
    net.pause()  # closing does not wait
    router = net.open(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    assert net.is_empty(router)


def test_what_lingers_is_sent_once_there_is_a_connection(net: Sockets) -> None:
    port = net.unused_port()
    dealer = net.connected(zmq.DEALER, f"tcp://127.0.0.1:{port}", reconnect_ivl=10)
    send(dealer, b"text")
    dealer.close(linger=5000)
    router = net.open(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    assert net.receive(router)[1:] == [b"text"]


def test_a_peer_that_has_gone_cannot_be_sent_to(net: Sockets) -> None:
    router, identity, dealer = net.pair(router_mandatory=True)
    dealer.close(linger=0)
    net.discard(router)
    assert error_of(send, router, identity, b"text") == errno.EHOSTUNREACH


def test_without_reconnecting_the_end_is_final(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    dealer = net.open(zmq.DEALER, reconnect_ivl=NEVER)
    monitor = net.watch(dealer, READY | DISCONNECTED | CLOSED)
    dealer.connect(address)
    assert monitor.next()[0] == READY
    router.close(linger=0)
    assert monitor.next()[0] == DISCONNECTED
    assert monitor.is_silent()
    net.discard(dealer)
    assert error_of(send, dealer, b"text") == errno.EAGAIN


def test_without_reconnecting_a_refused_connection_is_reported_once(net: Sockets) -> None:
    dealer = net.open(zmq.DEALER, reconnect_ivl=NEVER)
    monitor = net.watch(dealer, READY | DISCONNECTED | CLOSED)
    dealer.connect(f"tcp://127.0.0.1:{net.unused_port()}")
    assert monitor.next()[0] == CLOSED
    assert monitor.is_silent()


def test_a_dealer_connects_again_and_keeps_what_is_queued(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    dealer = net.open(zmq.DEALER, reconnect_ivl=10)
    monitor = net.watch(dealer, READY | DISCONNECTED)
    dealer.connect(address)
    send(dealer, b"before")
    first = net.receive(router)[0]
    give_up(net, router, address)
    assert monitor.kinds(2) == [READY, DISCONNECTED]
    send(dealer, b"between")
    again = net.open(zmq.ROUTER)
    again.bind(address)
    identity, text = net.receive(again)
    assert text == b"between"
    assert len(identity) == len(first)
    assert monitor.next()[0] == READY


def test_a_new_connection_has_a_new_identity(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    known = set()
    for _ in range(3):
        dealer = net.connected(zmq.DEALER, address)
        send(dealer, b"text")
        known.add(net.receive(router)[0])
        dealer.close(linger=0)
    assert len(known) == 3


# ---- listening ------------------------------------------------------------------------------------------


def test_an_address_is_bound_once(net: Sockets) -> None:
    _, address = net.bound(zmq.ROUTER)
    assert address.startswith("tcp://127.0.0.1:")
    assert error_of(net.open(zmq.ROUTER).bind, address) == errno.EADDRINUSE


def test_an_address_that_was_given_up_is_free(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    give_up(net, router, address)
    again = net.open(zmq.ROUTER)
    again.bind(address)
    dealer = net.connected(zmq.DEALER, address)
    send(dealer, b"text")
    assert net.receive(again)[1:] == [b"text"]


def test_giving_up_an_address_ends_its_connections_in_silence(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER, router_mandatory=True)
    dealer = net.open(zmq.DEALER, reconnect_ivl=NEVER)
    client = net.watch(dealer, READY | DISCONNECTED)
    dealer.connect(address)
    send(dealer, b"text")
    identity, _ = net.receive(router)
    monitor = net.watch(router, DISCONNECTED)
    router.unbind(address)
    net.discard(router)
    assert client.kinds(2) == [READY, DISCONNECTED]
    assert monitor.is_silent()
    assert error_of(send, router, identity, b"text") == errno.EHOSTUNREACH


def test_malformed_addresses_are_refused(net: Sockets) -> None:
    dealer = net.open(zmq.DEALER)
    for address in ("tcp://127.0.0.1", "tcp://127.0.0.1:port", "nothing", "udpx://127.0.0.1:1"):
        assert error_of(dealer.connect, address) in (errno.EINVAL, errno.EPROTONOSUPPORT)
    assert error_of(net.open(zmq.ROUTER).bind, "tcp://192.0.2.1:*") in (errno.ENODEV, errno.EADDRNOTAVAIL)


def test_a_descriptor_that_listens_can_be_handed_over(net: Sockets) -> None:
    listener = net.world.socket.socket(sockets.AF_INET, sockets.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(10)
    listener.setblocking(False)
    port = listener.getsockname()[1]
    router = net.open(zmq.ROUTER)
    monitor = net.watch(router, LISTENING)
    router.set(zmq.USE_FD, listener.fileno())
    router.bind(f"tcp://127.0.0.1:{port}")
    router.set(zmq.USE_FD, -1)
    assert monitor.next() == (LISTENING, listener.detach())
    assert router.getsockopt_string(zmq.LAST_ENDPOINT) == f"tcp://127.0.0.1:{port}"
    dealer = net.connected(zmq.DEALER, f"tcp://127.0.0.1:{port}")
    send(dealer, b"text")
    assert net.receive(router)[1:] == [b"text"]


def test_connections_wait_while_nobody_accepts(net: Sockets) -> None:
    listener = net.world.socket.socket(sockets.AF_INET, sockets.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(10)
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    dealer = net.open(zmq.DEALER, reconnect_ivl=NEVER)
    monitor = net.watch(dealer, CONNECTED | READY | DISCONNECTED)
    dealer.connect(address)
    send(dealer, b"text")
    assert monitor.next()[0] == CONNECTED
    assert monitor.is_silent()
    router = net.open(zmq.ROUTER)
    listener.setblocking(False)
    router.set(zmq.USE_FD, listener.detach())
    router.bind(address)
    assert monitor.next()[0] == READY
    assert net.receive(router)[1:] == [b"text"]


# ---- events ---------------------------------------------------------------------------------------------


def test_both_ends_report_a_connection(net: Sockets) -> None:
    router = net.open(zmq.ROUTER)
    server = net.watch(router, LISTENING | ACCEPTED | READY | DISCONNECTED)
    router.bind("tcp://127.0.0.1:*")
    assert server.next()[0] == LISTENING
    dealer = net.open(zmq.DEALER, reconnect_ivl=NEVER)
    client = net.watch(dealer, CONNECTED | READY | DISCONNECTED)
    dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
    kind, fd = server.next()
    assert kind == ACCEPTED
    assert server.next() == (READY, 0)
    kind, own = client.next()
    assert kind == CONNECTED
    assert own != fd
    assert client.next() == (READY, 0)
    dealer.close(linger=0)
    assert server.next() == (DISCONNECTED, fd)


def test_only_the_events_that_were_asked_for_are_reported(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    monitor = net.watch(router, DISCONNECTED)
    dealer = net.connected(zmq.DEALER, address)
    send(dealer, b"text")
    net.receive(router)
    assert monitor.is_silent()
    dealer.close(linger=0)
    assert monitor.next()[0] == DISCONNECTED


def test_a_monitor_can_be_ended(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    net.watch(router, ACCEPTED).close()
    dealer = net.connected(zmq.DEALER, address)
    send(dealer, b"text")
    assert net.receive(router)[1:] == [b"text"]
    monitor = net.watch(router, DISCONNECTED)  # and followed by another
    dealer.close(linger=0)
    assert monitor.next()[0] == DISCONNECTED


def test_a_message_tells_its_connection_and_peer(net: Sockets) -> None:
    router = net.open(zmq.ROUTER)
    monitor = net.watch(router, ACCEPTED)
    router.bind("tcp://127.0.0.1:*")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    dealer = net.connected(zmq.DEALER, address)
    send(dealer, b"text")
    frame = net.receive_frames(router)[1]
    _, fd = monitor.next()
    assert frame.get(zmq.SRCFD) == fd
    assert frame.get("Peer-Address") == "127.0.0.1"
    assert error_of(frame.get, "User-Id") == errno.EINVAL
    own = net.world.os.dup(fd)
    connection = net.world.socket.socket(fileno=own)
    assert connection.getsockname()[1] == int(address.rpartition(":")[2])
    connection.close()


def test_shutting_down_its_descriptor_ends_a_connection(net: Sockets) -> None:
    router = net.open(zmq.ROUTER, router_mandatory=True)
    monitor = net.watch(router, ACCEPTED | DISCONNECTED)
    router.bind("tcp://127.0.0.1:*")
    dealer = net.open(zmq.DEALER, reconnect_ivl=NEVER)
    client = net.watch(dealer, DISCONNECTED)
    dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
    _, fd = monitor.next()
    copy = net.world.socket.socket(fileno=net.world.os.dup(fd))
    copy.shutdown(sockets.SHUT_RDWR)
    copy.close()
    assert monitor.next() == (DISCONNECTED, fd)
    assert client.next()[0] == DISCONNECTED


def test_the_event_of_a_monitor_names_the_address(net: Sockets) -> None:
    router = net.open(zmq.ROUTER)
    monitor = net.watch(router, LISTENING)
    router.bind("tcp://127.0.0.1:*")
    event, address = net.receive(monitor.pair)
    assert len(event) == struct.calcsize("=HI")
    assert address.decode() == router.getsockopt_string(zmq.LAST_ENDPOINT)


# ---- handshakes -----------------------------------------------------------------------------------------


def test_a_stranger_that_hangs_up_is_reported(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER)
    monitor = net.watch(router, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | ACCEPTED | DISCONNECTED)
    stranger = net.world.socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
    _, fd = monitor.next()
    stranger.close()
    assert monitor.next()[0] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    assert monitor.next() == (DISCONNECTED, fd)


def test_a_stranger_that_says_nothing_is_cut(net: Sockets) -> None:
    router, address = net.bound(zmq.ROUTER, handshake_ivl=100)
    monitor = net.watch(router, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | ACCEPTED | DISCONNECTED)
    with net.world.socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as stranger:
        _, fd = monitor.next()
        assert monitor.next()[0] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        assert monitor.next() == (DISCONNECTED, fd)
        greeting = stranger.recv(100)
        assert greeting[:1] == b"\xff"
        assert net.world.ready(stranger, select.POLLIN, SECONDS * 1000)


def test_a_server_that_says_nothing_is_tried_again(net: Sockets) -> None:
    with net.world.socket.create_server(("127.0.0.1", 0)) as server:
        dealer = net.open(zmq.DEALER, handshake_ivl=50, reconnect_ivl=10)
        monitor = net.watch(dealer, CONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | DISCONNECTED)
        dealer.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        expected = [CONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, DISCONNECTED, CONNECTED]
        assert monitor.kinds(4) == expected
        send(dealer, b"text")  # it waits for a connection


# ---- publishing -----------------------------------------------------------------------------------------


def publisher(net: Sockets, **options: Any) -> tuple[Any, Any]:
    """Returns an XPUB, and a SUB that has connected to it."""
    xpub, address = net.bound(zmq.XPUB, **options)
    return xpub, net.connected(zmq.SUB, address)


def test_a_subscriber_receives_its_topics_only(net: Sockets) -> None:
    xpub, sub = publisher(net)
    sub.subscribe(b"a")
    sub.subscribe(b"bc")
    assert net.receive(xpub) == [b"\x01a"]
    assert net.receive(xpub) == [b"\x01bc"]
    for topic in (b"b", b"a", b"", b"ab", b"bcd", b"c"):
        send(xpub, topic, b"text")
    for topic in (b"a", b"ab", b"bcd"):
        assert net.receive(sub) == [topic, b"text"]
    assert net.is_empty(sub)


def test_the_first_subscription_and_the_last_end_of_a_topic_are_passed_on(net: Sockets) -> None:
    xpub, one = publisher(net)
    address = xpub.getsockopt_string(zmq.LAST_ENDPOINT)
    one.subscribe(b"topic")
    assert net.receive(xpub) == [b"\x01topic"]
    two = net.connected(zmq.SUB, address)
    two.subscribe(b"topic")
    two.subscribe(b"other")
    assert net.receive(xpub) == [b"\x01other"]
    one.unsubscribe(b"topic")
    two.unsubscribe(b"other")
    assert net.receive(xpub) == [b"\x00other"]
    send(xpub, b"topic", b"text")
    assert net.receive(two) == [b"topic", b"text"]
    assert net.is_empty(one)
    two.unsubscribe(b"topic")
    assert net.receive(xpub) == [b"\x00topic"]


def test_a_subscriber_that_leaves_ends_its_subscriptions(net: Sockets) -> None:
    xpub, sub = publisher(net)
    sub.subscribe(b"topic")
    assert net.receive(xpub) == [b"\x01topic"]
    sub.close(linger=0)
    assert net.receive(xpub) == [b"\x00topic"]


def test_a_subscription_tells_its_connection(net: Sockets) -> None:
    xpub = net.open(zmq.XPUB)
    monitor = net.watch(xpub, ACCEPTED)
    xpub.bind("tcp://127.0.0.1:*")
    sub = net.connected(zmq.SUB, xpub.getsockopt_string(zmq.LAST_ENDPOINT))
    sub.subscribe(b"topic")
    (frame,) = net.receive_frames(xpub)
    assert frame.get(zmq.SRCFD) == monitor.next()[1]


def test_a_topic_that_was_subscribed_to_twice_ends_with_the_second_end(net: Sockets) -> None:
    xpub, sub = publisher(net)
    sub.subscribe(b"topic")
    sub.subscribe(b"topic")
    assert net.receive(xpub) == [b"\x01topic"]
    sub.unsubscribe(b"topic")
    send(xpub, b"topic", b"text")
    assert net.receive(sub) == [b"topic", b"text"]
    sub.unsubscribe(b"topic")
    assert net.receive(xpub) == [b"\x00topic"]


def test_ending_what_was_not_subscribed_to_has_no_effect(net: Sockets) -> None:
    xpub, sub = publisher(net)
    sub.unsubscribe(b"topic")
    sub.subscribe(b"other")
    assert net.receive(xpub) == [b"\x01other"]
    assert net.is_empty(xpub)


def test_a_subscriber_subscribes_again_after_a_break(net: Sockets) -> None:
    xpub, address = net.bound(zmq.XPUB)
    sub = net.open(zmq.SUB, reconnect_ivl=10)
    sub.subscribe(b"topic")
    sub.connect(address)
    assert net.receive(xpub) == [b"\x01topic"]
    assert net.is_empty(sub)
    give_up(net, xpub, address)
    again = net.open(zmq.XPUB)
    again.bind(address)
    assert net.is_empty(again)  # the subscriber does so in the thread that reads it
    assert net.wait(sub.getsockopt(zmq.FD))
    assert error_of(sub.recv, zmq.NOBLOCK) == errno.EAGAIN
    assert net.receive(again) == [b"\x01topic"]
    send(again, b"topic", b"text")
    assert net.receive(sub) == [b"topic", b"text"]


def test_publishing_to_nobody_succeeds(net: Sockets) -> None:
    xpub, _ = net.bound(zmq.XPUB)
    for _ in range(3000):
        send(xpub, b"topic", b"text")


def test_a_slow_subscriber_misses_whole_messages(net: Sockets) -> None:
    xpub, address = net.bound(zmq.XPUB, sndhwm=5)
    sub = net.connected(zmq.SUB, address, rcvhwm=5)
    sub.subscribe(b"topic")
    assert net.receive(xpub) == [b"\x01topic"]
    data = bytes(1 << 20)
    for number in range(100):
        send(xpub, b"topic", b"%d" % number, data)
        if number % 10 == 0:
            net.pause(1)
    received = []
    while not net.is_empty(sub):
        topic, number_sent, rest = net.receive(sub)
        assert topic == b"topic"
        assert rest == data
        received.append(int(number_sent))
    assert received == sorted(received)
    assert 5 <= len(received) < 100


# ---- contexts -------------------------------------------------------------------------------------------


def test_a_closed_socket_says_so(net: Sockets) -> None:
    router, _ = net.bound(zmq.ROUTER)
    assert not router.closed
    router.close(linger=0)
    router.close(linger=0)
    assert router.closed
    assert error_of(router.recv, zmq.NOBLOCK) == errno.ENOTSOCK


def test_a_context_has_a_limit_of_sockets(world: World) -> None:
    context = world.zmq.Context(1)
    context.set(zmq.MAX_SOCKETS, 3)
    opened = [context.socket(zmq.DEALER) for _ in range(3)]
    assert error_of(context.socket, zmq.DEALER) == errno.EMFILE
    opened.pop().close(linger=0)
    for socket in opened:
        socket.close(linger=0)
    context.term()
    assert context.closed


def test_a_context_knows_its_threads(net: Sockets) -> None:
    assert net.context.get(zmq.IO_THREADS) == 1
    socket = net.open(zmq.DEALER)
    assert socket.context is net.context
    assert net.context.get(zmq.SOCKET_LIMIT) > 1023


def test_a_socket_is_closed_at_the_end_of_its_block(net: Sockets) -> None:
    with net.open(zmq.DEALER) as socket:
        assert not socket.closed
    assert socket.closed


def test_options_keep_their_values(net: Sockets) -> None:
    dealer = net.open(zmq.DEALER, reconnect_ivl=NEVER, sndhwm=3, affinity=1, ipv6=True)
    assert dealer.getsockopt(zmq.RECONNECT_IVL) == NEVER
    assert (dealer.sndhwm, dealer.rcvhwm, dealer.linger) == (3, 1000, 0)
    assert dealer.getsockopt(zmq.TYPE) == zmq.DEALER
    dealer.setsockopt(zmq.MAXMSGSIZE, 10)
    assert dealer.maxmsgsize == 10
