"""The servers of this process by address, so that several masters can share one if they ask to."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from zmqgrad.store.server import StoreServer


class Servers:
    """The servers of this process by address, so that several masters can share one if they ask to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _shared
        self._shared: dict[str, tuple[StoreServer, int]] = {}  # and how many use it

    def lend(self, address: str, shared: bool, **options: Any) -> StoreServer:
        """A server at ``address``: with ``shared`` the one that is there, if it is shared, too.

        ``options`` are those of :class:`StoreServer`, for one that is not there yet.
        """
        make = partial(StoreServer, address, **options)
        if not shared or address.endswith(":*"):
            return make()
        with self._lock:
            there = self._shared.get(address)
            server, users = there or (make(), 0)
            self._shared[address] = (server, users + 1)
            return server

    def give_back(self, server: StoreServer) -> None:
        """Close ``server``, unless others still use it."""
        with self._lock:
            for address, (shared, users) in self._shared.items():
                if shared is server and users > 1:
                    self._shared[address] = (server, users - 1)
                    return
                if shared is server:
                    del self._shared[address]
                    break
            server.close()


servers = Servers()
