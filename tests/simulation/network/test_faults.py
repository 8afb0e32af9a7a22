"""What the model of the network does that a test of the real one cannot."""

from __future__ import annotations

import errno
import select
import socket
from typing import Any

import pytest
import zmq

from zmqgrad.testing.simulation.network import Deadlock, Faults, ManualScheduler, Network, Process

IN, OUT, ERR, HUP = select.POLLIN, select.POLLOUT, select.POLLERR, select.POLLHUP


class Hosts:
    """Two processes of two hosts, connected by TCP."""

    def __init__(self, **faults: float) -> None:
        self.scheduler = ManualScheduler(7)
        self.network = Network(self.scheduler, Faults(self.scheduler.rng, **faults))
        self.one, self.two = self.network.process("one", 1), self.network.process("two", 2)
        self.address = (self.network.address("two"), 4000)
        self.listening = self.socket(self.two)
        self.listening.bind(self.address)
        self.listening.listen(10)

    def socket(self, process: Process) -> Any:
        return process.modules["socket"].socket(socket.AF_INET, socket.SOCK_STREAM)

    def connected(self, **options: int) -> tuple[Any, Any]:
        opened = self.socket(self.one)
        for name, value in options.items():
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        opened.connect(self.address)
        return opened, self.listening.accept()[0]

    def wait(self, process: Process, waiting: Any, milliseconds: float | None = 1000) -> int:
        poll = process.modules["select"].poll()
        poll.register(waiting, IN)
        return sum(event for _, event in poll.poll(milliseconds))

    def sockets(self, **options: int) -> tuple[Any, Any, bytes]:
        """Returns a ROUTER of host two, a DEALER of host one, and the identity of that."""
        router = self.two.modules["zmq"].Context().socket(zmq.ROUTER)
        router.router_mandatory = 1
        router.bind("tcp://*:*")
        port = router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        dealer = self.one.modules["zmq"].Context().socket(zmq.DEALER)
        for name, value in options.items():
            setattr(dealer, name, value)
        dealer.connect(f"tcp://two:{port}")
        dealer.send(b"hello")
        identity, text = router.recv_multipart()
        assert text == b"hello"
        return router, dealer, identity


def test_hosts_have_addresses_and_names() -> None:
    hosts = Hosts()
    one, two = hosts.connected()
    assert one.getpeername() == two.getsockname() == hosts.address
    assert one.getsockname()[0] == two.getpeername()[0] == hosts.network.address("one")
    lookup = hosts.one.modules["socket"].getaddrinfo
    assert lookup("two", None, socket.AF_INET)[0][4][0] == hosts.address[0]
    other = hosts.socket(hosts.one)
    assert other.connect_ex(("127.0.0.1", 4000)) == errno.ECONNREFUSED  # of another host


def test_unix_sockets_are_of_one_host() -> None:
    hosts = Hosts()
    unix = [p.modules["socket"].socket(socket.AF_UNIX, socket.SOCK_STREAM) for p in (hosts.one, hosts.two)]
    unix[0].bind("\0name")
    unix[0].listen(1)
    assert unix[1].connect_ex("\0name") == errno.ECONNREFUSED


def test_what_is_late_keeps_its_order() -> None:
    hosts = Hosts(latency=0.5)
    one, two = hosts.connected()
    for number in range(50):
        one.send(bytes([number]))
    assert not hosts.wait(hosts.two, two, 0)
    received = b""
    while len(received) < 50:
        received += two.recv(100)
    assert received == bytes(range(50))
    assert 0 < hosts.scheduler.now() < 5


def test_nothing_passes_a_partition_until_it_heals() -> None:
    hosts = Hosts()
    one, two = hosts.connected()
    hosts.network.partition(["one"], ["two"], both=False)
    one.send(b"late")
    two.send(b"back")
    assert hosts.wait(hosts.one, one) == IN
    assert not hosts.wait(hosts.two, two)
    hosts.network.heal()
    assert two.recv(10) == b"late"


def test_the_kernel_gives_up_in_a_partition_as_it_was_told() -> None:
    hosts = Hosts()
    one, _ = hosts.connected(TCP_USER_TIMEOUT=2000)
    hosts.network.partition(["one"], ["two"])
    one.send(b"lost")
    assert hosts.wait(hosts.one, one, 1500) == 0
    assert hosts.wait(hosts.one, one, 1000) & ERR
    with pytest.raises(TimeoutError):
        one.recv(1)


def test_connecting_in_a_partition() -> None:
    hosts = Hosts()
    hosts.network.partition(["one"], ["two"])
    one = hosts.socket(hosts.one)
    one.setblocking(False)
    assert one.connect_ex(hosts.address) == errno.EINPROGRESS
    assert not hosts.wait(hosts.one, one, 5000)
    hosts.network.heal()
    hosts.wait(hosts.one, one, 1500)
    assert one.getpeername() == hosts.address


def test_a_connection_is_dropped_with_what_was_on_its_way() -> None:
    hosts = Hosts(latency=0.5)
    one, two = hosts.connected()
    one.send(b"lost")
    assert hosts.network.drop_connections() == 1
    for process, end in ((hosts.one, one), (hosts.two, two)):
        assert hosts.wait(process, end, 0) & ERR
        with pytest.raises(ConnectionResetError):
            end.recv(10)
    assert hosts.wait(hosts.two, two, 1000) & HUP
    assert two.recv(10) == b""


def test_a_killed_process_closes_what_it_had() -> None:
    hosts = Hosts()
    one, two = hosts.connected()
    two.send(b"last")
    hosts.two.kill()
    assert [one.recv(10), one.recv(10)] == [b"last", b""]
    again = hosts.socket(hosts.one)
    assert again.connect_ex(hosts.address) == errno.ECONNREFUSED
    hosts.two.kill()


def test_messages_in_flight_are_lost_with_their_connection_and_later_ones_arrive() -> None:
    hosts = Hosts(latency=0.2)
    router, dealer, _ = hosts.sockets(reconnect_ivl=10)
    dealer.send(b"lost")
    hosts.scheduler.point("the I/O thread sends it")
    assert hosts.network.drop_connections() == 1
    dealer.send(b"kept")
    assert router.recv_multipart()[1] == b"kept"


def test_a_killed_peer_is_unroutable() -> None:
    hosts = Hosts()
    router, _, identity = hosts.sockets()
    hosts.one.kill()
    hosts.wait(hosts.two, router.getsockopt(zmq.FD))
    assert not router.getsockopt(zmq.EVENTS) & zmq.POLLIN
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([identity, b"text"])
    assert caught.value.errno == errno.EHOSTUNREACH


def test_a_frozen_process_receives_when_it_thaws() -> None:
    hosts = Hosts()
    router, dealer, _ = hosts.sockets()
    hosts.two.freeze()
    dealer.send(b"text")
    assert not router.poll(1000)
    hosts.two.thaw()
    assert router.recv_multipart()[1] == b"text"


def test_sending_while_a_connection_is_being_opened() -> None:
    for seed in range(40):
        hosts = Hosts(latency=0.002, io_seconds=0.002)
        hosts.scheduler.rng.seed(seed)
        router = hosts.two.modules["zmq"].Context().socket(zmq.ROUTER)
        router.bind("tcp://*:5000")
        dealer = hosts.one.modules["zmq"].Context().socket(zmq.DEALER)
        dealer.connect("tcp://two:5000")
        for number in range(10):
            dealer.send(bytes([number]))
            hosts.wait(hosts.one, dealer.getsockopt(zmq.FD), 1)
        assert [router.recv_multipart()[1][0] for _ in range(10)] == list(range(10))
        assert hosts.scheduler.now() < 1  # no handshake was begun twice


def test_a_seed_repeats_what_happens() -> None:
    def run() -> list[float]:
        hosts = Hosts(latency=0.1, io_seconds=0.1)
        router, dealer, identity = hosts.sockets()
        moments = []
        for _ in range(20):
            router.send_multipart([identity, b"ping"])
            assert dealer.recv() == b"ping"
            dealer.send(b"pong")
            assert router.recv_multipart()[1] == b"pong"
            moments.append(hosts.scheduler.now())
        return moments

    assert run() == run()


def test_waiting_for_nothing_is_a_deadlock() -> None:
    hosts = Hosts()
    with pytest.raises(Deadlock):
        hosts.listening.accept()
