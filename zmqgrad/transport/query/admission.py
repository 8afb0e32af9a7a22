"""Admission control of a query server: counts clients, and refuses those above the limit. Pure.

libzmq does not report which client a connection belongs to. So clients on tcp are counted as the smaller of
two numbers: connections that completed the handshake and did not break, and clients that sent a ping by tcp
and none by the fast path since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sized


class Admission:
    """The clients of one server. Used by the server's thread; the counts may be read by any.

    Args:
        limit: the maximum number of clients.
        local_connections: the open connections of the fast path.
    """

    def __init__(self, limit: int, local_connections: Sized) -> None:
        self.limit = limit
        self.accepted = self.connected = self.failed = self.disconnected = 0
        """Tcp connections: accepted; with their handshake completed, or failed; and ended."""
        self.surplus: set[bytes] = set()
        """Routing ids of the clients that were refused."""
        self._local_connections = local_connections
        self._tcp_clients: OrderedDict[int, None] = OrderedDict()
        self._local_clients: dict[Hashable, int] = {}
        self._local_ids: set[int] = set()  # the values of _local_clients

    @property
    def clients(self) -> int:
        """How many clients are connected. A client that changes to the fast path counts once."""
        connected = self.connected - (self.disconnected - self.failed)
        return len(self._local_connections) + min(connected, len(self._tcp_clients))

    @property
    def pending(self) -> int:
        """How many tcp connections are in the handshake."""
        return max(0, self.accepted - self.connected - self.failed)

    def has_room(self) -> bool:
        """Returns whether another client may connect."""
        return self.clients < self.limit

    def knows(self, client: int) -> bool:
        """Returns whether ``client`` was admitted before, by either path."""
        return client in self._tcp_clients or client in self._local_ids

    def add_tcp(self, client: int) -> None:
        """Admits ``client``, which connected by tcp."""
        self._tcp_clients[client] = None
        if len(self._tcp_clients) > 2 * self.limit:
            self._tcp_clients.popitem(last=False)

    def add_local(self, connection: Hashable, client: int) -> None:
        """Counts ``client`` as one of the fast path from now on."""
        self._tcp_clients.pop(client, None)
        self._local_clients[connection] = client
        self._local_ids.add(client)

    def remove_local(self, connection: Hashable) -> None:
        """Forgets the client of ``connection``, which has ended."""
        client = self._local_clients.pop(connection, None)
        if client is not None:
            self._local_ids.discard(client)

    def readmit(self) -> None:
        """Lets refused clients try again if there is room."""
        if self.surplus and self.has_room():
            self.surplus.clear()
