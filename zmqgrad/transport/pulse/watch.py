"""Watching: each peer is asked for signs of life, and whoever is gone, or silent, is told of.

A connection that breaks is opened again soon, for how that goes tells a process that has ended from one that
only lost its connection, and from a host that is out of reach.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import selectors
import socket as sockets
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.transport.base import Lost, Suspected
from zmqgrad.transport.liveness import (
    RETRY_SECONDS,
    Judgement,
    Limits,
    Refusals,
    Vital,
    host_and_port,
    is_on_this_host,
    unix_path,
)
from zmqgrad.transport.pulse.guests import Guests, Listener
from zmqgrad.transport.pulse.speech import PING, PINGS_AT_ONCE, SCHEME, TOKEN_SIZE, read, write

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.05
"""A connection that broke is opened again after so long: what a dying peer sent last may still come."""


class _Contact:
    """A peer that is watched. ``socket`` is None while a connection is awaited that was tried too early."""

    def __init__(self, peer: int, address: str, vital: Vital) -> None:
        self.peer = peer
        self.address = address
        self.vital = vital
        self.on_this_host = is_on_this_host(address)
        self.refusals = Refusals()
        self.local = address.startswith("ipc://")
        self.token = b"" if self.local else bytes.fromhex(address.rpartition("/")[2])
        self.socket: sockets.socket | None = None
        self.greeting = b""  # what has come of the token
        self.trouble = ""  # what the system said last of a connection that could not be opened
        self.at = 0.0  # when to ping, or to connect


class Watch:
    """Watches peers, and answers those that watch this worker.

    Args:
        listener: where they ask; closed with the watch.
        lost: told of peers that are gone, and why that is believed; from the watch's thread; must not block.
        suspected: told of those that are silent, and of those that speak again.
    """

    def __init__(
        self,
        name: str,
        listener: Listener,
        lost: Lost,
        suspected: Suspected,
        limits: Limits = Limits(),  # noqa: B008 (immutable)
        clock: Clock = MONOTONIC,
    ) -> None:
        self._lost = lost
        self._suspected = suspected
        self._limits = limits
        self._clock = clock
        self._orders: SimpleQueue[tuple[int, str | None] | None] = SimpleQueue()
        self._wake, self._woken = sockets.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        # Touched by the thread alone from here on.
        self._contacts: dict[int, _Contact] = {}
        self._guests = Guests(f"{name}-liveness", listener, self._selector, clock)
        _watches.add(self)
        self._thread = threading.Thread(target=self._run, name=f"{name}-liveness", daemon=True)
        self._thread.start()

    def follow(self, peer: int, address: str) -> None:
        """Watch ``peer``, whose pulse is felt at ``address``. Harmless if it is watched already."""
        self._order((peer, address))

    def forget(self, peer: int) -> None:
        """Watch ``peer`` no more."""
        self._order((peer, None))

    def close(self) -> None:
        """Watch no more, and answer no more. Idempotent."""
        self._order(None)

    def _order(self, order: tuple[int, str | None] | None) -> None:
        self._orders.put(order)
        try:
            self._wake.send(b"!")
        except OSError as e:  # full: it is awake; closed: it has ended
            logger.debug("no need to wake %s: %s", self._thread.name, e)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the thread; gives its name if it has not ended by ``deadline``."""
        if self._thread is not threading.current_thread():
            self._thread.join(deadline.timeout())
        return [self._thread.name] if self._thread.is_alive() else []

    # ---- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        select = self._selector
        select.register(self._woken, selectors.EVENT_READ, self._take_orders)
        self._guests.let_in()
        self._goes_on = True
        try:
            while self._goes_on:
                for key, _ in select.select(self._seconds_to_next()):
                    handle: Callable[[Any], None] = key.data
                    handle(key.fileobj)
                self._do_due(self._clock.now())
        except Exception:
            logger.exception("%s has ended: peers that die will be missed", self._thread.name)
        finally:
            self.close_sockets()
            select.close()

    def close_sockets(self) -> None:
        """Close every socket of the watch in this process (in a fork: its copies)."""
        for own in (self._guests, self._wake, self._woken):
            own.close()
        for contact in self._contacts.values():
            if contact.socket is not None:
                contact.socket.close()

    def _take_orders(self, woken: sockets.socket) -> None:
        read(woken)
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return
            if order is None:
                self._goes_on = False
                return
            peer, address = order
            known = self._contacts.get(peer)
            if known is not None and known.address == address:
                continue
            if known is not None:
                self._drop(known)
            if address is not None:
                local = address.startswith("ipc://")
                patience = self._limits.local if local else self._limits.remote / 2
                vital = Vital(patience, self._limits.frozen, self._clock.now())
                contact = self._contacts[peer] = _Contact(peer, address, vital)
                self._connect(contact)

    # ---- watching ---------------------------------------------------------------------------------------

    def _seconds_to_next(self) -> float | None:
        due = min([c.at for c in self._contacts.values()], default=math.inf)
        due = min(due, self._guests.next_due())
        return None if due == math.inf else max(0.0, due - self._clock.now())

    def _do_due(self, now: float) -> None:
        self._guests.do_due(now)
        for contact in [c for c in self._contacts.values() if c.at <= now]:
            contact.at = now + contact.vital.interval
            judgement = contact.vital.tick(now)
            silent = now - contact.vital.last_heard
            if self._is_out_of_reach(contact):
                seen = f"it has accepted no connection for {contact.vital.silence:.1f} s{contact.trouble}"
                self._lose(contact, f"its host is out of reach ({seen})")
            elif judgement is Judgement.FROZEN:
                self._lose(contact, f"its process has said nothing for {silent:.0f} s, though it exists")
            elif judgement is Judgement.SUSPECTED:
                self._tell(self._suspected, contact.peer, silent)
            if contact.peer not in self._contacts:
                continue
            if contact.socket is None:
                self._connect(contact)
            else:
                write(contact.socket, PING)  # what cannot be written shows when it is read

    def _is_out_of_reach(self, contact: _Contact) -> bool:
        """Has its kernel not even taken a connection for so long? (It does where the process is frozen.)"""
        if contact.local or contact.greeting or contact.vital.silence < self._limits.remote:
            return False
        try:
            return contact.socket is None or not contact.socket.getpeername()
        except OSError:
            return True

    def _connect(self, contact: _Contact) -> None:
        """Open a connection; how that went is seen when it can be written to."""
        contact.at = self._clock.now() + contact.vital.interval
        contact.greeting = b""
        try:
            if contact.local:
                opened = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
                target: Any = unix_path(contact.address)
            else:
                target = host_and_port(contact.address.removeprefix(SCHEME))
                opened = sockets.socket(
                    sockets.AF_INET6 if ":" in target[0] else sockets.AF_INET, sockets.SOCK_STREAM
                )
                self._set_patience(opened)
        except OSError as e:
            logger.warning("%s cannot watch worker %d: %s", self._thread.name, contact.peer, e)
            return
        opened.setblocking(False)
        contact.socket = opened
        error = opened.connect_ex(target)
        if error in (0, errno.EINPROGRESS):
            self._selector.register(opened, selectors.EVENT_READ, lambda _: self._hear(contact))
        else:
            self._broken(contact, error, connecting=True)

    def _set_patience(self, opened: sockets.socket) -> None:
        """Have the kernel give up a host that acknowledges nothing, in time."""
        opened.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
        if hasattr(sockets, "TCP_USER_TIMEOUT"):
            seconds = self._limits.remote * (1 - 0.5 / 3)  # less the time until the next ping goes out
            opened.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, int(seconds * 1000))

    def _hear(self, contact: _Contact) -> None:
        """Something has come from a peer: the token, an answer, or the end."""
        if contact.socket is None:
            return
        try:
            said = contact.socket.recv(PINGS_AT_ONCE)
        except BlockingIOError:
            return
        except OSError as e:
            self._broken(contact, e.errno or 0, connecting=not contact.greeting)
            return
        if not said:
            self._broken(contact, 0, connecting=False)
            return
        if len(contact.greeting) < TOKEN_SIZE:
            contact.greeting += said
            if contact.token and not contact.token.startswith(contact.greeting[:TOKEN_SIZE]):
                self._lose(contact, f"another process listens at {contact.address.rpartition('/')[0]} now")
                return
        contact.refusals.clear()
        if contact.vital.heard(self._clock.now()) is Judgement.RECOVERED:
            self._tell(self._suspected, contact.peer, 0.0)

    def _broken(self, contact: _Contact, error: int, *, connecting: bool) -> None:
        """The connection to a peer is no more, or could not be opened."""
        self._hang_up(contact)
        now = self._clock.now()
        if error == errno.ECONNREFUSED or (contact.local and error == errno.ENOENT):
            if contact.on_this_host:
                self._lose(contact, "its process has ended")
            elif (seconds := contact.refusals.refused(now)) >= self._limits.refused:
                self._lose(contact, f"connection refused for {seconds:.1f} s")
            else:
                contact.at = now + RETRY_SECONDS
        elif error in _OUT_OF_REACH:
            contact.trouble = f", {os.strerror(error)}"
            contact.at = now + contact.vital.interval
        elif connecting:
            contact.at = now + contact.vital.interval  # too many connect there: it lives
        else:
            contact.at = now + AGAIN_SECONDS

    def _hang_up(self, contact: _Contact) -> None:
        opened, contact.socket = contact.socket, None
        if opened is not None:
            if opened in self._selector.get_map():
                self._selector.unregister(opened)
            opened.close()

    def _drop(self, contact: _Contact) -> None:
        self._hang_up(contact)
        del self._contacts[contact.peer]

    def _lose(self, contact: _Contact, why: str) -> None:
        self._drop(contact)
        silent = self._clock.now() - contact.vital.last_heard
        self._tell(self._lost, contact.peer, f"{why} (last heard of {silent:.1f} s before)")

    def _tell(self, listener: Callable[[int, Any], None], peer: int, what: Any) -> None:
        try:
            listener(peer, what)
        except Exception:
            logger.exception("telling of worker %d (%s) failed", peer, what)


_OUT_OF_REACH = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN))


# A fork (a data loader's worker, say) gets copies of all sockets. While it lives the kernel would keep the
# connections of its parent open, and nobody would see that one die.
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _close_in_fork() -> None:
    for watch in list(_watches):
        watch.close_sockets()


os.register_at_fork(after_in_child=_close_in_fork)
