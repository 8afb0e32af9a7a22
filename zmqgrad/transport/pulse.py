"""Heartbeats: who lives is asked on small sockets of their own, in a thread named ``<name>-liveness``.

On a connection of its own a ping waits behind no message, however large, and its kernel tells what libzmq
keeps to itself: that the process at the other end has ended, or that its host is out of reach. What is
heard becomes a judgement in :mod:`~zmqgrad.transport.liveness`.

Each worker listens beside its mailbox: on one host at the ipc address with ``-pulse`` appended, between hosts
at a tcp port that its endpoint ``pulse://host:port/token`` names. Who connects is told the token (so that
another process at the same port is known as another), and gets a byte back for each that it sends.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import secrets
import selectors
import socket as sockets
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from zmqgrad.errors import TransportError
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.transport.base import Lost, Suspected
from zmqgrad.transport.liveness import Judgement, Limits, Vital, host_and_port, unix_path

logger = logging.getLogger(__name__)

SUFFIX = "-pulse"
SCHEME = "pulse://"
TOKEN_SIZE = 16
PING = b"?"

AGAIN_SECONDS = 0.05
"""A connection that broke is opened again after so long: what a dying peer sent last may still come."""

PAUSE_SECONDS = 1.0
"""Nobody is let in for so long after the process ran out of descriptors."""

MAX_GUESTS = 1 << 16
"""How many may connect: there are no more workers than that. Over tcp nobody proves who he is, so they get no
more than half of the descriptors that the process may have; then the one who came first makes room. If he is
one of ours, he connects again, and knows by that alone that this worker lives."""


class Listener:
    """Where peers ask whether this worker lives. Made with the mailbox, as its address is published."""

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


class _Contact:
    """A peer that is watched. ``socket`` is None while a connection is awaited that was tried too early."""

    def __init__(self, peer: int, address: str, vital: Vital) -> None:
        self.peer = peer
        self.address = address
        self.vital = vital
        self.local = address.startswith("ipc://")
        self.token = b"" if self.local else bytes.fromhex(address.rpartition("/")[2])
        self.socket: sockets.socket | None = None
        self.greeting = b""  # what has come of the token
        self.at = 0.0  # when to ping, or to connect


def pulse_of(endpoint: str, endpoints: Sequence[str]) -> str | None:
    """Where the pulse of the peer is felt whose mailbox is sent to at ``endpoint``; None if nowhere."""
    if endpoint.startswith("ipc://"):
        return endpoint + SUFFIX
    return next((e for e in endpoints if e.startswith(SCHEME)), None)


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
        self._listener = listener
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
        self._guests: dict[sockets.socket, None] = {}  # the first first
        self._most_guests = _most_guests()
        self._paused: dict[sockets.socket, float] = {}  # listeners, and when to go on with them
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
            self._thread.join(deadline.left_or_none())
        return [self._thread.name] if self._thread.is_alive() else []

    # ---- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        select = self._selector
        select.register(self._woken, selectors.EVENT_READ, self._take_orders)
        for listening in self._listener.sockets:
            select.register(listening, selectors.EVENT_READ, self._accept)
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
        self._listener.close()
        for own in (self._wake, self._woken, *self._guests):
            own.close()
        for contact in self._contacts.values():
            if contact.socket is not None:
                contact.socket.close()

    def _take_orders(self, woken: sockets.socket) -> None:
        _read(woken)
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

    # ---- being watched ----------------------------------------------------------------------------------

    def _accept(self, listening: sockets.socket) -> None:
        try:
            guest, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        except OSError as e:  # this process has no more descriptors: those who ask must wait
            logger.warning("%s cannot accept: %s", self._thread.name, e)
            self._selector.unregister(listening)
            self._paused[listening] = self._clock.now() + PAUSE_SECONDS
            return
        if not _same_user(guest):
            guest.close()
            return
        if len(self._guests) >= self._most_guests:
            self._see_off(next(iter(self._guests)))
        guest.setblocking(False)
        self._guests[guest] = None
        self._selector.register(guest, selectors.EVENT_READ, self._answer)
        _write(guest, self._listener.token)

    def _answer(self, guest: sockets.socket) -> None:
        if guest not in self._guests:
            return  # seen off a moment ago
        asked = _read(guest)
        if asked:
            _write(guest, asked[:PINGS_AT_ONCE])
        elif asked is not None:
            self._see_off(guest)

    def _see_off(self, guest: sockets.socket) -> None:
        self._selector.unregister(guest)
        del self._guests[guest]
        guest.close()

    # ---- watching ---------------------------------------------------------------------------------------

    def _seconds_to_next(self) -> float | None:
        times = [*(c.at for c in self._contacts.values()), *self._paused.values()]
        return max(0.0, min(times) - self._clock.now()) if times else None

    def _do_due(self, now: float) -> None:
        for listening in [s for s, at in self._paused.items() if at <= now]:
            del self._paused[listening]
            self._selector.register(listening, selectors.EVENT_READ, self._accept)
        for contact in [c for c in self._contacts.values() if c.at <= now]:
            contact.at = now + contact.vital.interval
            judgement = contact.vital.tick(now)
            silent = now - contact.vital.last_heard
            if self._is_out_of_reach(contact):
                self._lose(contact, "its host is out of reach (it takes no connection)")
            elif judgement is Judgement.FROZEN:
                self._lose(contact, f"its process has said nothing for {silent:.0f} s, though it exists")
            elif judgement is Judgement.SUSPECTED:
                self._tell(self._suspected, contact.peer, silent)
            if contact.peer not in self._contacts:
                continue
            if contact.socket is None:
                self._connect(contact)
            else:
                _write(contact.socket, PING)  # what cannot be written shows when it is read

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
        if contact.vital.heard(self._clock.now()) is Judgement.RECOVERED:
            self._tell(self._suspected, contact.peer, 0.0)

    def _broken(self, contact: _Contact, error: int, *, connecting: bool) -> None:
        """The connection to a peer is no more, or could not be opened."""
        self._hang_up(contact)
        if error == errno.ECONNREFUSED or (contact.local and error == errno.ENOENT):
            self._lose(contact, "its process has ended")
        elif error in _OUT_OF_REACH:
            self._lose(contact, f"its host is out of reach ({os.strerror(error)})")
        elif connecting:
            contact.at = self._clock.now() + contact.vital.interval  # too many connect there: it lives
        else:
            contact.at = self._clock.now() + AGAIN_SECONDS

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


def _most_guests() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_GUESTS if allowed == resource.RLIM_INFINITY else max(1, min(MAX_GUESTS, allowed // 2))


PINGS_AT_ONCE = 256
"""Bytes that are read and answered at a time."""

_OUT_OF_REACH = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN))


def _read(socket: sockets.socket) -> bytes | None:
    """What has come; empty at the end; None if nothing has."""
    try:
        return socket.recv(PINGS_AT_ONCE)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _write(socket: sockets.socket, data: bytes) -> None:
    """Send what can be sent at once. That the other end is gone shows when it is read."""
    try:
        socket.send(data)
    except OSError as e:
        logger.debug("a heartbeat was not sent: %s", e)


def _same_user(guest: sockets.socket) -> bool:
    """Is it a process of this user that has connected? (Over tcp that cannot be told.)"""
    if guest.family != sockets.AF_UNIX or not hasattr(sockets, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", guest.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12))
    return bool(user == os.getuid())


# A fork (a data loader's worker, say) gets copies of all sockets. While it lives the kernel would keep the
# connections of its parent open, and nobody would see that one die.
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _close_in_fork() -> None:
    for watch in list(_watches):
        watch.close_sockets()


os.register_at_fork(after_in_child=_close_in_fork)
