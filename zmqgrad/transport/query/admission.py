"""Admission control of a query server: counts clients, and refuses those above the limit. Pure.

A client counts from its first ping to the end of its connection. Events of connections and messages arrive
separately, so a ping may be read when its connection has ended, and another has the same descriptor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class Admission:
    """The clients of one server. Used by the server's thread; the counts may be read by any.

    Args:
        limit: the maximum number of clients.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.refused: set[int] = set()
        """Descriptors of the tcp connections of clients that were refused."""
        self._open: set[int] = set()  # descriptors of tcp connections
        self._tcp_clients: dict[int, int] = {}  # the client of each, by descriptor
        # Their last descriptors or -1, of all that are connected, and those that left last.
        self._known: OrderedDict[int, int] = OrderedDict()
        self._local_clients: dict[Hashable, int] = {}  # by connection of the fast path
        self._local_ids: set[int] = set()  # the values of _local_clients

    @property
    def clients(self) -> int:
        """How many clients are connected. A client that changes to the fast path counts once."""
        return len(self._local_clients) + len(self._tcp_clients)

    def on_accepted(self, fd: int) -> None:
        """Notes a new tcp connection."""
        self._open.add(fd)

    def on_disconnected(self, fd: int) -> None:
        """Forgets a tcp connection, which has ended."""
        self._open.discard(fd)
        self.refused.discard(fd)
        self._tcp_clients.pop(fd, None)

    def admit_tcp(self, client: int, fd: int) -> bool:
        """Returns whether ``client``, which has sent a ping by tcp, is served.

        One that was refused must connect again; one that was admitted before is served beyond the limit.
        """
        if client in self._local_ids or fd not in self._open:
            return True
        others = self.clients - (fd in self._tcp_clients)
        if fd in self.refused or (client not in self._known and others >= self.limit):
            self.refused.add(fd)
            return False
        self._remember(client, fd)
        self._tcp_clients[fd] = client
        return True

    def knows(self, client: int) -> bool:
        """Returns whether ``client`` was admitted before."""
        return client in self._known

    def add_local(self, connection: Hashable, client: int) -> None:
        """Counts ``client`` as one of the fast path from now on."""
        fd = self._known.get(client, -1)
        if self._tcp_clients.get(fd) == client:
            del self._tcp_clients[fd]
        self._remember(client, -1)
        self._local_clients[connection] = client
        self._local_ids.add(client)

    def remove_local(self, connection: Hashable) -> None:
        """Forgets the client of ``connection``, which has ended."""
        client = self._local_clients.pop(connection, None)
        if client is not None:
            self._local_ids.discard(client)

    def _remember(self, client: int, fd: int) -> None:
        """Called before ``client`` is counted. Forgets another one that has left, if there are many."""
        known = self._known
        known[client] = fd
        known.move_to_end(client)
        for _ in range(len(known) - 1 if len(known) > 2 * self.limit else 0):
            oldest, fd = known.popitem(last=False)
            if oldest not in self._local_ids and self._tcp_clients.get(fd) != oldest:
                break
            known[oldest] = fd
