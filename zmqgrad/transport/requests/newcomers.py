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
import socket
from collections.abc import Callable

from zmqgrad.runtime.clock import Clock
from zmqgrad.transport.door import is_of_this_user
from zmqgrad.transport.requests.connection import Client
from zmqgrad.transport.requests.nearby import Nearby, set_up_nearby, shown
from zmqgrad.transport.requests.pipes import has_room, send_with_pipes
from zmqgrad.transport.requests.ready import READ, Poller
from zmqgrad.transport.security import Keys
from zmqgrad.transport.tcp import set_up
from zmqgrad.transport.zmtp import Unpacker, opening

logger = logging.getLogger(__name__)

MAX_PENDING = 4096
"""How many may be about to say who they are. Then the one that has been so longest makes room."""

ACCEPTS_AT_ONCE, STRANGERS_AT_ONCE = 16, 64
"""So many connections are taken, and so many of those heard that have not said who they are, between two
rounds in which all others are answered. The latter is more, as a handshake takes several: or those who come
would pile up, and each would be dropped before it was heard."""

FULL_SECONDS = 0.25
"""How long nobody is taken after the system had no descriptor or memory to give for him."""

GREETING_SECONDS = 10.0
"""How long a connection may take to say who it is."""

NEARBY = "this host:nearby"
"""What stands in the log for the address of one who came by the unix socket."""


class Newcomers:
    """Takes those who come to ``listener``, and keeps them until :meth:`welcome`. In one thread.

    Args:
        listener: a socket that listens at ``endpoint``; closed by :meth:`close`. It is registered with
            ``poller``, and so is one for those nearby: when one is ready, :meth:`accept` is to be called.
        name: of the server, for log lines.
        keys: what is spoken is protected by them; None: by nothing.
        take: hears a client from now on, and says something to it first, if there is something to say.
        refuse: counts and logs what a client did wrong.
        end: closes a client, and calls :meth:`forget`.
        wake_by: calls :meth:`do_due` at that moment, or sooner.
    """

    def __init__(
        self,
        listener: socket.socket,
        endpoint: str,
        *,
        name: str,
        keys: Keys | None,
        poller: Poller,
        clock: Clock,
        take: Callable[[Client, bytes], None],
        refuse: Callable[[Client, str], None],
        end: Callable[[Client], None],
        wake_by: Callable[[float], None],
    ) -> None:
        self._listener = listener
        self._listeners = {listener.fileno(): listener}
        self._nearby: Nearby | None = None
        if keys is None:
            try:
                self._nearby = Nearby()
                self._listeners[self._nearby.listener.fileno()] = self._nearby.listener
            except OSError as e:
                logger.debug("%s at %s: all who come, come by tcp: %s", name, endpoint, e)
        self._endpoint = endpoint
        self._name = name
        self._keys = keys
        self._poller = poller
        self._clock = clock
        self._take = take
        self._refuse = refuse
        self._end = end
        self._wake_by = wake_by
        self._full = False  # did the last one find the system without a descriptor for him?
        self._listen_again = math.inf  # when, should the system have no more connections to give
        self._with_pipes: set[Client] = set()
        self._pending: dict[Client, float] = {}  # and until when they may be; the first first
        self._hear_all()

    def _hear_all(self) -> None:
        for number in self._listeners:
            self._poller.register(number, READ)

    @property
    def numbers(self) -> list[int]:
        """The descriptors of the listeners."""
        return list(self._listeners)

    def __len__(self) -> int:
        return len(self._pending)

    def accept(self, number: int) -> None:
        """Take those who have come to the listener whose descriptor is ``number``; if they are many, some."""
        listener = self._listeners[number]
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, where = listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if self._pending:
                        self._end(next(iter(self._pending)))  # it may be one who only takes up room
                        continue
                    if not self._full:
                        logger.error("%s at %s: cannot take more clients: %s", self._name, self._endpoint, e)
                    self._full = True
                    for each in self._listeners:
                        self._poller.unregister(each)  # or poll would come back at once
                    self._listen_again = self._clock.now() + FULL_SECONDS
                    self._wake_by(self._listen_again)
                    return
                continue  # it went before we looked
            self._full = False
            if len(self._pending) >= MAX_PENDING:
                self._end(next(iter(self._pending)))
            connection.setblocking(False)
            address = NEARBY
            if listener is self._listener:
                set_up(connection)
                address = shown(where)
            elif is_of_this_user(connection):
                set_up_nearby(connection)
            else:
                connection.close()
                continue  # he finds out himself, too, and stays on tcp
            unpacker, said = self._introduce(address)
            client = Client(connection, address, unpacker)
            if address is NEARBY and has_room(len(self._with_pipes)):
                client.ends = send_with_pipes(connection, said)
                if client.ends is not None:
                    self._with_pipes.add(client)
                    said = b""  # it is said
            self._pending[client] = self._clock.now() + GREETING_SECONDS
            self._wake_by(self._pending[client])
            self._take(client, said)

    def _introduce(self, address: str) -> tuple[Unpacker, bytes]:
        """Of a new connection from ``address``: how that end is to speak, and what this one says first."""
        if self._keys is None:
            return Unpacker("DEALER"), self._opening(address)
        from zmqgrad.transport.curve import CurveListener  # which takes a library that others need not load

        curve = CurveListener(self._keys, "ROUTER", "DEALER")
        return curve, curve.opening()

    def _opening(self, address: str) -> bytes:
        if self._nearby is None or address == NEARBY:
            return opening("ROUTER")
        return opening("ROUTER", self._nearby.invitation(address))

    def welcome(self, client: Client) -> None:
        """``client`` has said who it is."""
        client.stranger = False
        del self._pending[client]

    def forget(self, client: Client) -> None:
        """``client`` has ended; it may have been one of these."""
        self._pending.pop(client, None)
        self.forget_pipes(client)

    def forget_pipes(self, client: Client) -> None:
        """``client`` does without, or has ended. Idempotent."""
        ends, client.ends, client.pipe = client.ends, None, None
        if ends is not None:
            self._with_pipes.discard(client)
            for end in ends:
                end.close()

    def do_due(self, now: float) -> float:
        """Listen again, and drop those who have not said who they are. Gives the moment of the next."""
        if now >= self._listen_again:
            self._listen_again = math.inf
            self._hear_all()
        while self._pending:
            client, until = next(iter(self._pending.items()))
            if until > now:
                return min(until, self._listen_again)
            self._refuse(client, f"it has not said who it is within {GREETING_SECONDS:g} s")
            self._end(client)
        return self._listen_again

    def close(self) -> None:
        """Listen no more, and hang up on those who have not said who they are."""
        for client in (*self._pending, *self._with_pipes):
            client.closed = True
            client.socket.close()
            self.forget_pipes(client)
        self._pending.clear()
        for listener in self._listeners.values():
            listener.close()
