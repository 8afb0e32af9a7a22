"""Who asked, of a server's clients, and which of them wait: by request and by connection. Pure.

A client that has lost its connection asks again on the next, on the same line and with the same number, and
the server may not know yet that the first one broke. So a request waits once, for whoever asked it last; and
nobody takes a value from a queue for a connection that has ended.
"""

from __future__ import annotations

from typing import NamedTuple

from zmqgrad.store.effects import Reply, refuse
from zmqgrad.store.state import State
from zmqgrad.transport.requests.connection import Client
from zmqgrad.wire.messages import Message, Refusal

MAX_WAITING = 100_000
"""How many queries may wait at a time, of all clients together."""


class Asker(NamedTuple):
    """Who asked: request ``number`` on ``line``, which came from ``client``."""

    client: Client
    line: int
    number: int


class WaitingAskers:
    """Those whose queries wait in ``state``: ``most`` at a time, no more."""

    def __init__(self, state: State, most: int) -> None:
        self._state = state
        self._most = most
        self._waiting: dict[tuple[int, int], tuple[Asker, Message]] = {}  # by line and number, with the query
        self._of: dict[Client, set[Asker]] = {}

    def park(self, asker: Asker, query: Message) -> Reply | None:
        """``query`` of ``asker`` waits, as the state knows. Gives its refusal if too many do."""
        which = asker.line, asker.number
        if which in self._waiting:  # it was asked on a connection of which we do not know yet that it broke
            before = self._waiting[which][0]
            self.unpark(before)
            self._state.cancel(before)
        if len(self._waiting) >= self._most:
            self._state.cancel(asker)
            said = f"{self._most} queries wait there already, which is its limit"
            return refuse(asker, Refusal.LIMIT, said)
        self._waiting[which] = asker, query
        self._of.setdefault(asker.client, set()).add(asker)
        return None

    def unpark(self, asker: Asker) -> Message:
        """``asker``, who did, waits no more; the state knows. Gives its query."""
        of_client = self._of[asker.client]
        of_client.discard(asker)
        if not of_client:
            del self._of[asker.client]
        return self._waiting.pop((asker.line, asker.number))[1]

    def forget(self, client: Client) -> None:
        """``client`` has gone, and waits for nothing more."""
        for asker in list(self._of.get(client, ())):
            self.unpark(asker)
            self._state.cancel(asker)
