"""Cache of the reply to each client's last change, so that a repeated query is applied once.

After a broken connection a client cannot know whether its query arrived, and repeats it with the same id.
It has one query at a time, so one reply for each client suffices: the next query proves that the previous
reply has arrived. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from zmqgrad.wire.messages import Message, StoreValue

MAX_CLIENTS = 1 << 16
"""Limit of clients; beyond it, the client with the oldest change is evicted."""

MAX_BYTES = 256 << 20
"""Limit of the values in cached replies, in bytes; eviction as above."""


class ReplyCache:
    """The replies to the last changes, by client.

    Args:
        on_forgotten: called with each evicted client.
    """

    def __init__(
        self,
        max_clients: int = MAX_CLIENTS,
        max_bytes: int = MAX_BYTES,
        on_forgotten: Callable[[int], None] | None = None,
    ) -> None:
        self.last: dict[int, tuple[int, Message]] = {}
        """Request id and reply of each client's last change, in the order of changes. Read-only for others.

        An incoming query with a lower id is stale: its client no longer waits for the reply.
        """
        self.on_forgotten = on_forgotten
        self._max_clients = max_clients
        self._max_bytes = max_bytes
        self._sizes: dict[int, int] = {}  # of those that are values, by client
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.last)

    def remember(self, client_id: int, request_id: int, reply: Message) -> None:
        """Cache ``reply`` to query ``request_id`` of ``client_id``, which has changed the store."""
        last = self.last
        if last.pop(client_id, None) is None and len(last) >= self._max_clients:
            self._forget(next(iter(last)))
        last[client_id] = request_id, reply
        if type(reply) is StoreValue or client_id in self._sizes:
            self._count_bytes(client_id, reply)

    def _count_bytes(self, client_id: int, reply: Message) -> None:
        self._bytes -= self._sizes.pop(client_id, 0)
        if type(reply) is StoreValue:
            self._sizes[client_id] = len(reply.value)
            self._bytes += len(reply.value)
        while self._bytes > self._max_bytes and len(self.last) > 1:
            self._forget(next(iter(self.last)))

    def _forget(self, client_id: int) -> None:
        del self.last[client_id]
        self._bytes -= self._sizes.pop(client_id, 0)
        if self.on_forgotten is not None:
            self.on_forgotten(client_id)
