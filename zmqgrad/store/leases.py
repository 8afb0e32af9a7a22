"""State that a server keeps for its clients between queries: blocked queries, what they got, watches.

Each is a lease, which expires unless its client renews it. So dead clients cost nothing, and disconnects need
not be detected. A client has one query at a time. It repeats a query every few seconds until it receives the
reply, and acknowledges an item that it has popped; its next query ends either state. Pure.
"""

from __future__ import annotations

from zmqgrad.store.contents import Item
from zmqgrad.store.watch_targets import Target
from zmqgrad.transport.query.server import Route
from zmqgrad.wire.messages import Message

MAX_WAITING = 100_000
"""Limit of blocked queries, over all clients."""

RENEW_SECONDS = 15.0
"""A blocked query expires unless its client repeats it within this time. Clients repeat every 5 s."""

ACK_SECONDS = 10.0
"""An item returns to its queue unless it is acknowledged within this time."""

WATCH_SECONDS = 20.0
"""A watch expires unless it is renewed within this time. Clients renew every 5 s."""


class Requester:
    """A query, and the ``route`` of its last copy and of the reply.

    It is blocked, and expires unless it is repeated; or it has popped ``item`` from ``queue``, and expires
    unless that is acknowledged; or it was sent ``reply``, which may be lost, while its condition may hold no
    longer.
    """

    __slots__ = ("client_id", "expires", "item", "query", "queue", "reply", "request_id", "route")

    def __init__(self, route: Route, client_id: int, request_id: int, query: Message) -> None:
        self.route = route
        self.client_id = client_id
        self.request_id = request_id
        self.query = query
        self.queue = ""
        self.item: Item | None = None
        self.reply: Message | None = None
        self.expires = 0.0


class Requesters:
    """Blocked queries, unacknowledged items, and replies to those that waited; at most one per client."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.max_waiting = max_waiting
        self.open: dict[int, Requester] = {}
        """By client. Read-only for others."""
        self._waiting = 0

    def is_full(self) -> bool:
        """Whether the limit of blocked queries is reached."""
        return self._waiting >= self.max_waiting

    def block(self, requester: Requester, now: float) -> None:
        """Record that the query of ``requester`` is blocked."""
        requester.expires = now + RENEW_SECONDS
        self.open[requester.client_id] = requester
        self._waiting += 1

    def renew(self, requester: Requester, route: Route, now: float) -> None:
        """Extend the lease of the blocked ``requester``, which has repeated its query."""
        requester.route = route
        requester.expires = now + RENEW_SECONDS

    def deliver(self, requester: Requester, queue: str, item: Item, now: float) -> None:
        """Record that ``item`` was sent to ``requester``, which is no longer blocked."""
        self.release(requester.client_id)
        requester.queue, requester.item, requester.expires = queue, item, now + ACK_SECONDS
        self.open[requester.client_id] = requester

    def replied(self, requester: Requester, reply: Message, now: float) -> None:
        """Record that ``reply`` was sent to ``requester``, which is no longer blocked."""
        if requester.reply is None:
            self._waiting -= 1
        requester.reply, requester.expires = reply, now + RENEW_SECONDS

    def release(self, client_id: int) -> None:
        """Drop the entry of ``client_id``."""
        requester = self.open.pop(client_id, None)
        if requester is not None and requester.item is None and requester.reply is None:
            self._waiting -= 1

    def expired(self, now: float) -> list[Requester]:
        """The expired entries; takes time linear in the number of entries."""
        return [each for each in self.open.values() if each.expires <= now]


class WatchLeases:
    """Expiry times of watches, by target and watcher."""

    def __init__(self) -> None:
        self._leases: dict[Target, dict[int, float]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, target: Target, watcher: int, now: float) -> None:
        """Begin or extend the lease of ``watcher`` on ``target``."""
        self._leases.setdefault(target, {})[watcher] = now + WATCH_SECONDS

    def renew(self, target: Target, watcher: int, now: float) -> bool:
        """Extend a lease. Returns False if it has expired, so that the watcher may have missed changes."""
        leases = self._leases.get(target)
        if leases is None or watcher not in leases:
            return False
        leases[watcher] = now + WATCH_SECONDS
        return True

    def remove(self, target: Target, watcher: int) -> bool:
        """End a lease. Returns whether it was the last one on ``target``."""
        leases = self._leases.get(target)
        if leases is None or leases.pop(watcher, None) is None or leases:
            return False
        del self._leases[target]
        return True

    def expire(self, now: float) -> list[Target]:
        """End the leases that were not renewed. Returns the targets without any left."""
        late = [
            (target, watcher)
            for target, leases in self._leases.items()
            for watcher, expires in leases.items()
            if expires <= now
        ]
        return [target for target, watcher in late if self.remove(target, watcher)]
