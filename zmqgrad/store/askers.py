"""Who asked what, of a server, and which of them wait: by request and by connection. Pure.

A client that has lost its connection asks again on the next, on the same line and with the same number, and
the server may not know yet that the first one broke. So a request waits once, for whoever asked it last; and
nobody takes a value from a queue for a connection that has ended.
"""

from __future__ import annotations

from zmqgrad.store.effects import Effect, refuse
from zmqgrad.store.state import State
from zmqgrad.transport.request_connection import Client
from zmqgrad.wire.messages import Message, Refusal


class Asker:
    """Who asked what: request ``number`` on ``line``, which came from ``client``."""

    __slots__ = ("client", "line", "number", "query", "waits")

    def __init__(self, client: Client, line: int, number: int, query: Message) -> None:
        self.client = client
        self.line = line
        self.number = number
        self.query = query
        self.waits = False


class WaitingAskers:
    """Those whose queries wait in ``state``, ``most`` at a time; their ``waits`` says so."""

    def __init__(self, state: State, most: int) -> None:
        self._state = state
        self._most = most
        self._waiting: dict[tuple[int, int], Asker] = {}  # by line and number
        self._of: dict[Client, set[Asker]] = {}

    def park(self, asker: Asker) -> list[Effect]:
        """The query of ``asker`` has to wait. Gives its refusal if too many do."""
        before = self._waiting.get((asker.line, asker.number))
        if before is not None:  # it was asked on a connection of which we do not know yet that it broke
            self.unpark(before)
            self._state.cancel(before)
        if len(self._waiting) >= self._most:
            self._state.cancel(asker)
            said = f"{self._most} queries wait there already, which is its limit"
            return [refuse(asker, Refusal.LIMIT, said)]
        asker.waits = True
        self._waiting[asker.line, asker.number] = asker
        self._of.setdefault(asker.client, set()).add(asker)
        return []

    def unpark(self, asker: Asker) -> None:
        """``asker``, who did, waits no more; the state knows."""
        asker.waits = False
        del self._waiting[asker.line, asker.number]
        of_client = self._of[asker.client]
        of_client.discard(asker)
        if not of_client:
            del self._of[asker.client]

    def forget(self, client: Client) -> None:
        """``client`` has gone, and waits for nothing more."""
        for asker in list(self._of.get(client, ())):
            self.unpark(asker)
            self._state.cancel(asker)
