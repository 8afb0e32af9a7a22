"""Connections that have not authenticated: which is closed when there are too many, or it takes too long."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from zmqgrad.transport.strangers import HANDSHAKE_SECONDS, Strangers

LIMIT = 4


class Crowd:
    """Strangers, and the other ends of their connections."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []
        self.strangers = Strangers(LIMIT, self.call_later)
        self.far: dict[socket.socket, socket.socket] = {}

    def call_later(self, seconds: float, job: Callable[[], None]) -> None:
        assert seconds == HANDSHAKE_SECONDS
        self.later.append(job)

    def add(self, origin: object = "crowd") -> tuple[socket.socket, socket.socket | None]:
        near, self.far[near] = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        surplus = self.strangers.add(near, origin)
        if surplus is not None:
            assert self.strangers.remove(surplus)
        return near, surplus

    def pass_time(self) -> None:
        (job,) = self.later
        self.later.clear()
        job()

    def is_cut(self, near: socket.socket) -> bool:
        try:
            return self.far[near].recv(1, socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    made = Crowd()
    yield made
    for near, far in made.far.items():
        with closing(near), closing(far):
            pass


def test_beyond_the_limit_the_oldest_is_closed(crowd: Crowd) -> None:
    first = [crowd.add() for _ in range(LIMIT)]
    assert [surplus for _, surplus in first] == [None] * LIMIT
    assert crowd.add()[1] is first[0][0]
    assert crowd.add()[1] is first[1][0]


def test_whoever_has_many_pays_for_others(crowd: Crowd) -> None:
    """A peer stays among strangers that open one connection after the other, until it has authenticated."""
    peer, _ = crowd.add("peer")
    for _ in range(10 * LIMIT):
        assert crowd.add()[1] is not peer
    assert crowd.strangers.remove(peer)


def test_a_connection_must_authenticate_in_time(crowd: Crowd) -> None:
    slow, _ = crowd.add()
    crowd.pass_time()
    assert not crowd.is_cut(slow)
    quick, _ = crowd.add()
    assert crowd.strangers.remove(quick)
    crowd.pass_time()
    assert crowd.is_cut(slow)
    assert not crowd.is_cut(quick)
    assert not crowd.strangers.remove(slow)
    assert not crowd.later, "nobody is left to wait for"
    crowd.add()
    assert len(crowd.later) == 1


def test_what_was_not_read_yet_is_not_late(crowd: Crowd) -> None:
    """This process may have been stopped, or a thread of it held the interpreter lock."""
    peer, _ = crowd.add()
    crowd.far[peer].send(b"hello")
    for _ in range(3):
        crowd.pass_time()
    assert not crowd.is_cut(peer)
    assert peer.recv(10) == b"hello"
    assert crowd.strangers.remove(peer)
