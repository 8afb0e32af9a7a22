"""What must arrive is said until it is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zmqgrad.errors import PeerLostError, RpcError, RpcTimeoutError
from zmqgrad.rpc.reliable import MAX_BACKOFF, RETRY_SECONDS, ReliableSender
from zmqgrad.runtime.future import Promise
from zmqgrad.wire.messages import Message, RRefUserDelete

Settled = Callable[[Promise[Any]], None]

PEER = 3
NEWS = RRefUserDelete(((1, 2),))


class Wire:
    """Stands for a worker: keeps what is sent."""

    name = "teller"

    def __init__(self) -> None:
        self.said: list[tuple[int, Message, float]] = []
        self.settled: list[Settled] = []
        self.lost = False

    def request(
        self,
        peer: int,
        message: Message,
        *,
        seconds: float,
        description: str,
        on_done: Callable[[Promise[Any]], None],
    ) -> None:
        """As the worker's."""
        if self.lost:
            raise PeerLostError("gone")
        self.said.append((peer, message, seconds))
        self.settled.append(on_done)

    def fail(self, error: Exception) -> None:
        """The last request ends so."""
        outcome: Promise[Any] = Promise()
        outcome.set_exception(error)
        self.settled[-1](outcome)

    def answer(self) -> None:
        """The last request is answered."""
        outcome: Promise[Any] = Promise()
        outcome.set_result(None)
        self.settled[-1](outcome)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def sender(wire: Wire) -> ReliableSender:
    return ReliableSender(wire)


def test_a_message_is_resent_with_backoff_until_acknowledged(wire: Wire, sender: ReliableSender) -> None:
    heard: list[bool] = []
    sender.send(PEER, NEWS, lambda: heard.append(True))
    for _ in range(6):
        wire.fail(RpcTimeoutError("no answer"))
    assert [seconds / RETRY_SECONDS for _, _, seconds in wire.said] == [1, 2, 4, 8, 16, 16, 16]
    assert MAX_BACKOFF == 16
    assert {(peer, message) for peer, message, _ in wire.said} == {(PEER, NEWS)}
    assert heard == []
    wire.answer()
    assert heard == [True]
    assert len(wire.said) == 7


def test_nothing_is_resent_to_a_lost_peer(wire: Wire, sender: ReliableSender) -> None:
    sender.send(PEER, NEWS)
    wire.fail(PeerLostError("gone"))
    wire.lost = True
    sender.send(PEER, NEWS)
    assert len(wire.said) == 1


def test_nothing_is_resent_after_close(wire: Wire, sender: ReliableSender) -> None:
    sender.send(PEER, NEWS)
    sender.close()
    wire.fail(RpcTimeoutError("no answer"))
    wire.fail(RpcError("this worker was shut down"))
    sender.send(PEER, NEWS)
    assert len(wire.said) == 1
