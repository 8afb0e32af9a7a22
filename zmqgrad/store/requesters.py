"""What a server knows of each client between two of its queries: that one waits, or holds an item of a queue.

A client has one query at a time. While that waits, the client repeats it every few seconds; while an item
that it has popped is on its way, the client has yet to acknowledge it. Either is over when the client's next
query comes, and is given up if nothing comes for too long: so clients that died cost nothing, and no
disconnect has to be noticed. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from zmqgrad.store.contents import Item
from zmqgrad.transport.query.server import Route
from zmqgrad.wire.messages import Message

MAX_WAITING = 100_000
"""How many queries may wait at a time, of all clients together."""

RENEW_SECONDS = 15.0
"""A query that was not repeated for this long is forgotten: its client, which does so every 5 s, is gone."""

ACK_SECONDS = 10.0
"""An item that was not acknowledged for this long returns to its queue."""


class Requester:
    """Query ``number`` of ``client``. ``route`` is where it came from last, and where the reply goes."""

    __slots__ = ("client", "expires", "number", "query", "route")

    def __init__(self, route: Route, client: int, number: int, query: Message) -> None:
        self.route = route
        self.client = client
        self.number = number
        self.query = query
        self.expires = 0.0  # unless it is repeated until then


class Delivery(NamedTuple):
    """An item that a requester has popped, and that is not acknowledged."""

    requester: Requester
    queue: str
    item: Item
    expires: float


class Requesters:
    """Those whose queries wait, and those who hold an item: at most one of either for each client."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.max_waiting = max_waiting
        self.open: dict[int, Requester | Delivery] = {}
        """By client; to be looked at only."""
        self._waiting = 0

    def is_full(self) -> bool:
        """Do so many wait that no more may?"""
        return self._waiting >= self.max_waiting

    def park(self, requester: Requester, now: float) -> None:
        """``requester`` waits from now on."""
        requester.expires = now + RENEW_SECONDS
        self.open[requester.client] = requester
        self._waiting += 1

    def renew(self, requester: Requester, route: Route, now: float) -> None:
        """``requester``, which waits, has repeated its query."""
        requester.route = route
        requester.expires = now + RENEW_SECONDS

    def deliver(self, requester: Requester, queue: str, item: Item, now: float) -> None:
        """``requester``, which does not wait any more, is sent ``item``."""
        self.release(requester.client)
        self.open[requester.client] = Delivery(requester, queue, item, now + ACK_SECONDS)

    def release(self, client: int) -> None:
        """``client`` neither waits nor holds an item any more."""
        if type(self.open.pop(client, None)) is Requester:
            self._waiting -= 1

    def expired(self, now: float) -> list[Requester | Delivery]:
        """Those that have to be given up. Looks at all of them."""
        return [each for each in self.open.values() if each.expires <= now]
