"""A peer that ends is noticed; one whose connection breaks and that goes on to listen is not lost."""

from __future__ import annotations

import socket
import threading

import pytest

from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.liveness import answers
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.wire.messages import Hello

WAIT = 10.0


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_peer_that_ends_is_lost(kind: str) -> None:
    a, b = ZmqMailbox("a", 0), ZmqMailbox("b", 1)
    arrived, lost = threading.Event(), threading.Event()
    told: list[tuple[int, str]] = []
    [endpoint] = [e for e in b.endpoints if e.startswith(kind)]

    def on_lost(peer: int, where: str) -> None:
        told.append((peer, where))
        lost.set()

    try:
        a.start(lambda inbound: None, lambda peer: [endpoint], None, on_lost)
        b.start(lambda inbound: arrived.set(), lambda peer: a.endpoints)
        a.send(1, Hello("a"), 1)
        assert arrived.wait(WAIT)
        assert not lost.is_set()
        b.close()
        assert b.join(Deadline.after(WAIT)) == []
        assert lost.wait(WAIT)
        assert told == [(1, f"nobody listens at {endpoint} any more")]
    finally:
        for mailbox in (a, b):
            mailbox.close()
            assert mailbox.join(Deadline.after(WAIT)) == []


def test_answers_tells_who_listens() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        assert answers(endpoint)
    assert not answers(endpoint)
    assert not answers("ipc://@zmqgrad-nobody-is-here")
    assert answers("memory://3")  # cannot be told: not held against it
