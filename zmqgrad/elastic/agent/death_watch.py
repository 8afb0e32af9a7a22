"""Notices that the agent of another node has died when its kernel says so, before its heartbeat expires.

Each agent listens at a port, where it accepts nothing, until it has left the round or ends. Another one keeps
a connection to it: when the process ends, its kernel resets the connection, and refuses new ones. Between
hosts that counts only when it has lasted, as for workers. A host that is cut off, or loses its power, says
nothing: there, the heartbeat decides.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.transport.heartbeat.failure_detector import REFUSED_SECONDS, RETRY_SECONDS, is_on_this_host

CONNECT_SECONDS = 5.0
"""How long one attempt to connect may take."""


class DeathWatch:
    """A thread that watches the process which listens at ``address``, until it is closed.

    Args:
        address, port: of the process.
        on_death: called in the thread when the process has ended.
    """

    def __init__(self, address: str, port: int, on_death: Callable[[], None]) -> None:
        self._address = (address, port)
        self._on_death = on_death
        self._refused_seconds = 0.0 if is_on_this_host(f"tcp://{address}:{port}") else REFUSED_SECONDS
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards _connection
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._watch, name="zmqgrad-agent-death-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, without waiting for it. Idempotent."""
        self._closed.set()
        with self._lock:
            if self._connection is not None:
                with suppress(OSError):  # it has ended just now
                    self._connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the thread, after :meth:`close`."""
        self._thread.join(2 * CONNECT_SECONDS)

    def _watch(self) -> None:
        connection = self._connect()
        while connection is not None and self._stays_connected(connection):
            connection = self._connect_again()

    def _connect(self) -> socket.socket | None:
        """The first connection; None if there is none: a firewall may refuse it, which says nothing."""
        try:
            return socket.create_connection(self._address, CONNECT_SECONDS)
        except OSError:
            return None

    def _stays_connected(self, connection: socket.socket) -> bool:
        """Wait for the end of ``connection``. Returns False if it was closed here."""
        with connection:
            with self._lock:
                if self._closed.is_set():
                    return False
                self._connection = connection
            connection.settimeout(None)
            with suppress(OSError):  # a reset, which is the news
                connection.recv(1)
            with self._lock:
                self._connection = None
        return not self._closed.is_set()

    def _connect_again(self) -> socket.socket | None:
        """Connect after a connection has ended. Returns None if the process has ended, too."""
        refused_at = math.inf
        while not self._closed.is_set():
            try:
                return socket.create_connection(self._address, CONNECT_SECONDS)
            except ConnectionRefusedError:
                now = MONOTONIC.now()
                refused_at = min(refused_at, now)
                if now - refused_at >= self._refused_seconds:
                    self._on_death()
                    return None
            except OSError:
                refused_at = math.inf  # the path is cut
            self._closed.wait(RETRY_SECONDS)
        return None
