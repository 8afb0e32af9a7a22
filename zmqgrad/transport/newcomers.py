"""Who comes to a request server: connections are taken, and dropped if they do not say who they are.

Anybody can connect to a tcp port and say nothing, or do so a thousand times. So those who have not said who
they are count apart from those who have, are taken a few at a time, and have a deadline; when too many are
about to, the one that has been so longest makes room. A system that has no more connections to give costs
those who come a moment, and those who are there nothing.
"""

from __future__ import annotations

import errno
import logging
import math
import selectors
import socket
from collections.abc import Callable

from zmqgrad.runtime.clock import Clock
from zmqgrad.transport.request_connection import Client
from zmqgrad.transport.security import Keys
from zmqgrad.transport.tcp import set_up
from zmqgrad.transport.zmtp import Unpacker, opening

logger = logging.getLogger(__name__)

MAX_PENDING = 4096
"""How many may be about to say who they are. Then the one that has been so longest makes room."""

ACCEPTS_AT_ONCE = 16
"""How many connections are taken between two rounds in which all others are answered."""

FULL_SECONDS = 0.25
"""How long nobody is taken after the system had no descriptor or memory to give for him."""

GREETING_SECONDS = 10.0
"""How long a connection may take to say who it is."""

_OPENING = opening("ROUTER")


class Newcomers:
    """Takes those who come to ``listener``, and keeps them until :meth:`welcome`. In one thread.

    Args:
        listener: a socket that listens at ``endpoint``; closed by :meth:`close`.
        name: of the server, for log lines.
        keys: what is spoken is protected by them; None: by nothing.
        selector: where connections, and the listener itself (with what to call as its data), are registered.
        say: sends to a client.
        refuse: counts and logs what a client did wrong.
        end: closes a client, and calls :meth:`forget`.
    """

    def __init__(
        self,
        listener: socket.socket,
        endpoint: str,
        *,
        name: str,
        keys: Keys | None,
        selector: selectors.BaseSelector,
        clock: Clock,
        say: Callable[[Client, bytes], None],
        refuse: Callable[[Client, str], None],
        end: Callable[[Client], None],
    ) -> None:
        self._listener = listener
        self._endpoint = endpoint
        self._name = name
        self._keys = keys
        self._selector = selector
        self._clock = clock
        self._say = say
        self._refuse = refuse
        self._end = end
        self._full = False  # did the last one find the system without a descriptor for him?
        self.listen_again = math.inf
        """When, should the system have no more connections to give."""
        self.pending: dict[Client, float] = {}
        """Those who have not said who they are, and until when they may; the first first."""
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, where = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if self.pending:
                        self._end(next(iter(self.pending)))  # it may be one who only takes up room
                        continue
                    if not self._full:
                        logger.error("%s at %s: cannot take more clients: %s", self._name, self._endpoint, e)
                    self._full = True
                    self._selector.unregister(self._listener)  # or select would come back at once
                    self.listen_again = self._clock.now() + FULL_SECONDS
                    return
                continue  # it went before we looked
            self._full = False
            if len(self.pending) >= MAX_PENDING:
                self._end(next(iter(self.pending)))
            connection.setblocking(False)
            set_up(connection)
            unpacker, said = self._introduce()
            client = Client(connection, f"{where[0]}:{where[1]}", unpacker)
            self.pending[client] = self._clock.now() + GREETING_SECONDS
            self._selector.register(connection, selectors.EVENT_READ, client)
            self._say(client, said)

    def _introduce(self) -> tuple[Unpacker, bytes]:
        """Of a new connection: how the other end is to speak, and what this end says first."""
        if self._keys is None:
            return Unpacker("DEALER"), _OPENING
        from zmqgrad.transport.curve import CurveListener  # which takes a library that others need not load

        curve = CurveListener(self._keys, "ROUTER", "DEALER")
        return curve, curve.opening()

    def welcome(self, client: Client) -> None:
        """``client`` has said who it is."""
        client.stranger = False
        del self.pending[client]

    def forget(self, client: Client) -> None:
        """``client`` has ended; it may have been one of these."""
        self.pending.pop(client, None)

    def next_due(self) -> float:
        """When :meth:`do_due` has something to do; infinite for never."""
        return min(self.listen_again, next(iter(self.pending.values()), math.inf))

    def do_due(self, now: float) -> None:
        """Listen again, and drop those who have not said who they are."""
        if now >= self.listen_again:
            self.listen_again = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while self.pending:
            client, until = next(iter(self.pending.items()))
            if until > now:
                break
            self._refuse(client, f"it has not said who it is within {GREETING_SECONDS:g} s")
            self._end(client)

    def close(self) -> None:
        """Listen no more, and hang up on those who have not said who they are."""
        for client in self.pending:
            client.closed = True
            client.socket.close()
        self.pending.clear()
        self._listener.close()
