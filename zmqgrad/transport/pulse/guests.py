"""Being watched: where others ask whether this worker lives, and the answers that they get.

Over tcp nobody proves who he is, so guests may take no more than half of the descriptors that the process may
have; then the one who came first makes room. If he is one of ours, he connects again, and knows by that alone
that this worker lives. On one host only processes of the same user are let in.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import secrets
import selectors
import socket as sockets
import struct
from typing import Any

from zmqgrad.errors import TransportError
from zmqgrad.runtime.clock import Clock
from zmqgrad.transport.liveness import unix_path
from zmqgrad.transport.pulse.speech import PINGS_AT_ONCE, SCHEME, SUFFIX, TOKEN_SIZE, read, write

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Nobody is let in for so long after the process ran out of descriptors."""

MAX_GUESTS = 1 << 16
"""How many may connect: there are no more workers than that."""


class Listener:
    """Where peers ask whether this worker lives. Made with the mailbox, as its address is published.

    Raises:
        TransportError: if it cannot listen there.
    """

    def __init__(self, ipc_endpoint: str, tcp_host: str | None) -> None:
        self.token = secrets.token_bytes(TOKEN_SIZE)
        self.sockets: list[sockets.socket] = []
        self.endpoint: str | None = None
        try:
            self._listen(sockets.AF_UNIX, unix_path(ipc_endpoint + SUFFIX))
            if tcp_host is not None:
                family = sockets.AF_INET6 if ":" in tcp_host else sockets.AF_INET
                port = self._listen(family, (tcp_host, 0)).getsockname()[1]
                shown = f"[{tcp_host}]" if ":" in tcp_host else tcp_host
                self.endpoint = f"{SCHEME}{shown}:{port}/{self.token.hex()}"
        except OSError as e:
            self.close()
            raise TransportError(f"cannot listen for heartbeats beside {ipc_endpoint}: {e}") from e

    def _listen(self, family: int, address: Any) -> sockets.socket:
        listening = sockets.socket(family, sockets.SOCK_STREAM)
        self.sockets.append(listening)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(1024)
        return listening

    def close(self) -> None:
        """Listen no more. Idempotent."""
        for listening in self.sockets:
            listening.close()


class Guests:
    """Those who watch this worker: let in at ``listener``, and answered.

    All but the constructor in one thread. When a socket can be read, that calls what ``selector`` has as its
    data, with the socket.
    """

    def __init__(self, name: str, listener: Listener, selector: selectors.BaseSelector, clock: Clock) -> None:
        self._name = name
        self._listener = listener
        self._selector = selector
        self._clock = clock
        self._guests: dict[sockets.socket, None] = {}  # the first first
        self._most = _most_guests()
        self._paused: dict[sockets.socket, float] = {}  # listeners, and when to go on with them

    def let_in(self) -> None:
        """From now on."""
        for listening in self._listener.sockets:
            self._selector.register(listening, selectors.EVENT_READ, self._accept)

    def _accept(self, listening: sockets.socket) -> None:
        try:
            guest, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        except OSError as e:  # this process has no more descriptors: those who ask must wait
            logger.warning("%s cannot accept: %s", self._name, e)
            self._selector.unregister(listening)
            self._paused[listening] = self._clock.now() + PAUSE_SECONDS
            return
        if not _same_user(guest):
            guest.close()
            return
        if len(self._guests) >= self._most:
            self._see_off(next(iter(self._guests)))
        guest.setblocking(False)
        self._guests[guest] = None
        self._selector.register(guest, selectors.EVENT_READ, self._answer)
        write(guest, self._listener.token)

    def _answer(self, guest: sockets.socket) -> None:
        if guest not in self._guests:
            return  # seen off a moment ago
        asked = read(guest)
        if asked:
            write(guest, asked[:PINGS_AT_ONCE])
        elif asked is not None:
            self._see_off(guest)

    def _see_off(self, guest: sockets.socket) -> None:
        self._selector.unregister(guest)
        del self._guests[guest]
        guest.close()

    def next_due(self) -> float:
        """When :meth:`do_due` has something to do; infinite for never."""
        return min(self._paused.values(), default=math.inf)

    def do_due(self, now: float) -> None:
        """Go on letting in where that had to pause."""
        for listening in [s for s, at in self._paused.items() if at <= now]:
            del self._paused[listening]
            self._selector.register(listening, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Answer no more, and listen no more. Idempotent."""
        self._listener.close()
        for guest in self._guests:
            guest.close()


def _most_guests() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_GUESTS if allowed == resource.RLIM_INFINITY else max(1, min(MAX_GUESTS, allowed // 2))


def _same_user(guest: sockets.socket) -> bool:
    """Is it a process of this user that has connected? (Over tcp that cannot be told.)"""
    if guest.family != sockets.AF_UNIX or not hasattr(sockets, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", guest.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12))
    return bool(user == os.getuid())
