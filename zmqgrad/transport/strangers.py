"""Connections that have not authenticated yet: how many there may be, and for how long.

Whoever reaches a listening socket can open connections. So one that has many pays for those of others: beyond
the limit, the oldest of the origin (a process, or a host) with the most connections is closed. A process of
the job, which authenticates at once, is let in also while a stranger tries to fill the limit.
"""

from __future__ import annotations

import socket as sockets
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress

HANDSHAKE_SECONDS = 5.0
"""Within this time, or at most twice that, a connection must have authenticated."""


class Strangers:
    """The connections of one listener. One thread uses them; the timer may run in another.

    Args:
        limit: how many there may be.
        call_later: runs a job later, in any thread.
    """

    def __init__(self, limit: int, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._limit = limit
        self._call_later = call_later
        self._lock = threading.Lock()  # guards all below
        self._origins: dict[sockets.socket, Hashable] = {}  # oldest first
        self._overdue: dict[sockets.socket, None] = {}  # to be cut when the timer runs next
        self._armed = False

    def add(self, connection: sockets.socket, origin: Hashable) -> sockets.socket | None:
        """Adds a connection. Returns one that must be closed, if there are too many."""
        with self._lock:
            self._origins[connection] = origin
            arm, self._armed = not self._armed, True
            surplus = None if len(self._origins) <= self._limit else self._find_surplus()
        if arm:
            self._call_later(HANDSHAKE_SECONDS, self._expire)
        return surplus

    def _find_surplus(self) -> sockets.socket:
        most, _ = Counter(self._origins.values()).most_common(1)[0]
        return next(connection for connection, origin in self._origins.items() if origin == most)

    def remove(self, connection: sockets.socket) -> bool:
        """Forgets a connection, which has authenticated, or ended. Returns False if its time was over.

        To be called before the connection is closed.
        """
        with self._lock:
            self._overdue.pop(connection, None)
            return self._origins.pop(connection, None) is not None

    def _expire(self) -> None:
        """Ends connections that have not authenticated in time, as the thread that reads them then finds."""
        with self._lock:  # so none of them is closed meanwhile, and its descriptor another's
            for connection in filter(_is_silent, list(self._overdue)):
                del self._origins[connection]
                with suppress(OSError):  # it has ended
                    connection.shutdown(sockets.SHUT_RDWR)
            self._overdue = dict.fromkeys(self._origins)
            self._armed = bool(self._origins)
            again = self._armed
        if again:
            self._call_later(HANDSHAKE_SECONDS, self._expire)


def _is_silent(connection: sockets.socket) -> bool:
    """Returns whether nothing of it is left to read. If something is, this process is the slow one."""
    try:
        connection.recv(1, sockets.MSG_PEEK | sockets.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass  # it has ended, as will be read
    return False
