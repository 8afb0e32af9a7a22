"""CURVE and PLAIN, with an authenticator over inproc (ZAP), and what both ends report."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import zmq
from zmq.utils import z85

from tests.simulation.network.conftest import World
from tests.simulation.network.zmq_sockets import Sockets

READY, DISCONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
CUT, MALFORMED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
DENIED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
ALL = READY | DISCONNECTED | CUT | MALFORMED | DENIED
MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
NEVER = -1


class Pair(NamedTuple):
    """CURVE keys, as text."""

    public: bytes
    secret: bytes


SERVER, CLIENT, OTHER = (Pair(*zmq.curve_keypair()) for _ in range(3))


@pytest.fixture
def net(world: World) -> Iterator[Sockets]:
    """The sockets of a test."""
    opened = Sockets(world)
    yield opened
    opened.close()


class Authenticator:
    """A REP at the address of ZAP."""

    def __init__(self, net: Sockets) -> None:
        self._net = net
        self.socket: Any = net.open(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self, code: bytes = b"200", user: bytes = b"") -> list[bytes]:
        """Answers the next request, and returns it."""
        request = self._net.receive(self.socket)
        self.socket.send_multipart([*request[:2], code, b"text", user, b""])
        return request


def secured_router(net: Sockets, **options: Any) -> tuple[Any, str]:
    """Returns a ROUTER with CURVE and ``options``, and its address."""
    options |= {"zap_domain": b"test", "zap_enforce_domain": 1}
    return net.bound(zmq.ROUTER, curve_server=True, curve_secretkey=SERVER.secret, **options)


def secured_dealer(net: Sockets, server: Pair = SERVER, own: Pair = CLIENT, **options: Any) -> Any:
    """Returns a DEALER with CURVE."""
    return net.open(
        zmq.DEALER,
        curve_serverkey=server.public,
        curve_publickey=own.public,
        curve_secretkey=own.secret,
        **options,
    )


def test_the_authenticator_admits_by_the_key(net: Sockets) -> None:
    zap, (router, address) = Authenticator(net), secured_router(net)
    dealer = secured_dealer(net)
    server, client = net.watch(router, ALL), net.watch(dealer, ALL)
    dealer.connect(address)
    dealer.send(b"text", zmq.NOBLOCK)
    assert net.is_empty(router)  # not before it was admitted
    request = zap.answer(user=b"someone")
    version, _, domain, peer, identity, mechanism, key = request
    assert (version, domain, peer, identity) == (b"1.0", b"test", b"127.0.0.1", b"")
    assert (mechanism, z85.encode(key)) == (b"CURVE", CLIENT.public)
    assert server.next() == (READY, 0)
    assert client.next() == (READY, 0)
    frame = net.receive_frames(router)[1]
    assert frame.bytes == b"text"
    assert frame.get("User-Id") == "someone"
    assert frame.get(zmq.SRCFD) >= 0


def test_keys_may_be_given_as_bytes(net: Sockets) -> None:
    zap = Authenticator(net)
    raw = [z85.decode(text) for text in (SERVER.secret, SERVER.public, *CLIENT)]
    options = {"zap_domain": b"test", "zap_enforce_domain": 1}
    router, address = net.bound(zmq.ROUTER, curve_server=True, curve_secretkey=raw[0], **options)
    keys = {"curve_serverkey": raw[1], "curve_publickey": raw[2], "curve_secretkey": raw[3]}
    dealer = net.connected(zmq.DEALER, address, **keys)
    dealer.send(b"text", zmq.NOBLOCK)
    assert zap.answer()[-1] == raw[2]
    assert net.receive(router)[1:] == [b"text"]


def test_each_connection_is_authenticated(net: Sockets) -> None:
    zap, (router, address) = Authenticator(net), secured_router(net)
    dealers = []
    for _ in range(3):
        dealer = secured_dealer(net)
        dealer.connect(address)
        dealer.send(b"text", zmq.NOBLOCK)
        dealers.append(dealer)
    for _ in dealers:
        assert zap.answer()[-2] == b"CURVE"
    assert len({net.receive(router)[0] for _ in dealers}) == 3


def test_who_is_denied_does_not_try_again(net: Sockets) -> None:
    zap, (router, address) = Authenticator(net), secured_router(net)
    dealer = secured_dealer(net, own=OTHER, reconnect_ivl=10)
    server, client = net.watch(router, ALL), net.watch(dealer, ALL)
    dealer.connect(address)
    zap.answer(b"400")
    assert client.next() == (DENIED, 400)
    assert client.next()[0] == DISCONNECTED
    assert client.is_silent()
    assert server.next() == (DENIED, 400)
    assert server.next()[0] == DISCONNECTED
    net.discard(dealer)
    with pytest.raises(zmq.Again):
        dealer.send(b"text", zmq.NOBLOCK)
    assert net.is_empty(router)


def test_nobody_is_admitted_without_an_authenticator(net: Sockets) -> None:
    router, address = secured_router(net, handshake_ivl=100)
    dealer = secured_dealer(net, reconnect_ivl=10)
    server, client = net.watch(router, ALL), net.watch(dealer, ALL)
    dealer.connect(address)
    assert server.next()[0] == CUT  # at once, though libzmq may leave the connection open until the limit
    assert client.kinds(3) == [CUT, DISCONNECTED, CUT]  # it tries again


def test_a_client_with_the_key_of_another_server_is_cut(net: Sockets) -> None:
    Authenticator(net)
    router, address = secured_router(net)
    dealer = secured_dealer(net, server=OTHER, reconnect_ivl=10)
    server, client = net.watch(router, ALL), net.watch(dealer, ALL)
    dealer.connect(address)
    assert client.kinds(4) == [CUT, DISCONNECTED] * 2  # it tries again
    kind, value = server.next()
    assert kind == MALFORMED
    assert value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
    assert server.next()[0] == DISCONNECTED


@pytest.mark.parametrize("secured", ["server", "client"])
def test_mechanisms_that_differ_end_it_at_both_ends(net: Sockets, secured: str) -> None:
    Authenticator(net)
    router, address = secured_router(net) if secured == "server" else net.bound(zmq.ROUTER)
    if secured == "client":
        dealer = secured_dealer(net, reconnect_ivl=10)
    else:
        dealer = net.open(zmq.DEALER, reconnect_ivl=10)
    server, client = net.watch(router, ALL), net.watch(dealer, ALL)
    dealer.connect(address)
    for monitor in (server, client):
        assert monitor.next() == (MALFORMED, MISMATCH)
        assert monitor.next()[0] == DISCONNECTED
    assert client.is_silent()  # it does not try again, though libzmq may still take messages


@pytest.mark.parametrize("accepted", [True, False])
def test_a_password_is_what_the_authenticator_decides_by(net: Sockets, accepted: bool) -> None:
    zap = Authenticator(net)
    router, address = net.bound(zmq.ROUTER, plain_server=True, zap_domain=b"test", zap_enforce_domain=1)
    dealer = net.open(zmq.DEALER, plain_username=b"user", plain_password=b"pass", reconnect_ivl=NEVER)
    client = net.watch(dealer, ALL)
    dealer.connect(address)
    dealer.send(b"text", zmq.NOBLOCK)
    assert zap.answer(b"200" if accepted else b"400")[-3:] == [b"PLAIN", b"user", b"pass"]
    if accepted:
        assert client.next() == (READY, 0)
        assert net.receive(router)[1:] == [b"text"]
    else:
        assert client.next() == (DENIED, 400)
        assert client.next()[0] == DISCONNECTED
        assert net.is_empty(router)


def test_subscribers_are_authenticated_too(net: Sockets) -> None:
    zap = Authenticator(net)
    options = {"curve_server": True, "zap_domain": b"test", "zap_enforce_domain": 1}
    xpub, address = net.bound(zmq.XPUB, curve_secretkey=SERVER.secret, **options)
    keys = {
        "curve_serverkey": SERVER.public,
        "curve_publickey": CLIENT.public,
        "curve_secretkey": CLIENT.secret,
    }
    sub = net.connected(zmq.SUB, address, **keys)
    sub.subscribe(b"topic")
    zap.answer()
    assert net.receive(xpub) == [b"\x01topic"]
    xpub.send_multipart([b"topic", b"text"], zmq.NOBLOCK)
    assert net.receive(sub) == [b"topic", b"text"]


def test_a_peer_that_gives_up_while_it_is_authenticated_leaves_nothing(net: Sockets) -> None:
    zap, (router, address) = Authenticator(net), secured_router(net)
    monitor = net.watch(router, ALL)
    dealer = secured_dealer(net)
    dealer.connect(address)
    assert net.wait(zap.socket.getsockopt(zmq.FD))
    dealer.close(linger=0)
    zap.answer()
    assert monitor.next()[0] in (CUT, READY)  # as the answer is late, or in time
    assert monitor.next()[0] == DISCONNECTED
    assert net.is_empty(router)


def test_an_authenticator_answers_one_after_the_other(net: Sockets) -> None:
    zap = Authenticator(net)
    with pytest.raises(zmq.ZMQError) as refused:
        zap.socket.send(b"text", zmq.NOBLOCK)
    assert refused.value.errno == zmq.EFSM
    with pytest.raises(zmq.Again):
        zap.socket.recv(zmq.NOBLOCK)


def test_the_address_of_the_authenticator_is_bound_once(net: Sockets) -> None:
    Authenticator(net)
    second = net.open(zmq.REP)
    with pytest.raises(zmq.ZMQError) as refused:
        second.bind("inproc://zeromq.zap.01")
    assert refused.value.errno == errno.EADDRINUSE
