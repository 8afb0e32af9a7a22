"""Monitors peers by heartbeats, and reports those that are lost or silent.

A connection that breaks is opened again soon. The outcome distinguishes a process that has ended from one
that only lost its connection, and from an unreachable host.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import os
import secrets
import socket as sockets
from collections.abc import Callable
from functools import partial
from typing import Any

from zmqgrad.runtime.clock import MONOTONIC, Deadline
from zmqgrad.runtime.forks import in_forks
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.polling import READ
from zmqgrad.runtime.service_thread import Alarm, ServiceThread
from zmqgrad.transport.base import OnSuspected
from zmqgrad.transport.heartbeat.failure_detector import (
    RETRY_SECONDS,
    FailureDetector,
    LivenessChange,
    LivenessTimeouts,
    Refusals,
    host_and_port,
    is_on_this_host,
)
from zmqgrad.transport.heartbeat.protocol import (
    CHALLENGE_SIZE,
    GOODBYE,
    NONCE_SIZE,
    OF_LISTENER,
    OF_PEER,
    PING,
    PINGS_AT_ONCE,
    PROOF_SIZE,
    SCHEME,
    TOKEN_SIZE,
    prove,
    write,
)
from zmqgrad.transport.heartbeat.server import HeartbeatListener
from zmqgrad.transport.local import unix_name
from zmqgrad.transport.tap import OnHeartbeat

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.05
"""Delay before a broken connection is opened again: the last messages of a dying peer may still arrive."""


class _Peer:
    """A monitored peer. ``socket`` is None between two connection attempts."""

    def __init__(self, peer: int, address: str, detector: FailureDetector) -> None:
        self.peer = peer
        self.address = address
        self.detector = detector
        self.on_this_host = is_on_this_host(address)
        self.refusals = Refusals()
        self.local = address.startswith("ipc://")
        self.token = b"" if self.local else bytes.fromhex(address.rpartition("/")[2])
        self.socket: sockets.socket | None = None
        self.received = b""  # the greeting of the peer, and its proof, as far as they have arrived
        self.nonce = b""  # that was sent for this connection
        self.authenticated = False  # the peer has proven to be of this job
        self.goodbye = b""  # the last message of the peer, as far as it has arrived
        self.last_error = ""  # of a connection attempt, for error messages
        self.next_due = 0.0  # when to ping or to connect next, by MONOTONIC


OnLost = Callable[[int, str, bool], None]
"""Called with a lost peer, the reason, and whether its process has ended on this host; must not block."""


class HeartbeatMonitor:
    """Monitors peers, and replies to the heartbeats of others, in the thread of ``service``.

    Args:
        listener: where other workers connect; closed with the monitor.
        lost: called with a lost peer.
        suspected: called with a peer and its seconds of silence; 0 once it replies again.
        on_heartbeat: returns what to call with each heartbeat; None: nothing.
    """

    def __init__(
        self,
        name: str,
        listener: HeartbeatListener,
        service: ServiceThread,
        lost: OnLost,
        suspected: OnSuspected,
        timeouts: LivenessTimeouts = LivenessTimeouts(),  # noqa: B008 (immutable)
        on_heartbeat: Callable[[], OnHeartbeat | None] = lambda: None,
    ) -> None:
        self._name = f"{name}-liveness"
        self._on_heartbeat = on_heartbeat
        self._service = service
        self._lost = lost
        self._suspected = suspected
        self._timeouts = timeouts
        self._wanted: dict[int, str | None] = {}  # by peer, its address, or None to forget it
        # Used by the thread only from here on.
        self._peers: dict[int, _Peer] = {}
        self._alarm = Alarm(self._do_due, service)
        self._ended: Promise[None] = Promise()
        self._closed = False
        self._listener = listener
        in_forks(self, HeartbeatMonitor.close_sockets)
        service.call_soon(partial(listener.start, self._name, service))

    def watch(self, peer: int, address: str) -> None:
        """Monitors ``peer`` at its heartbeat endpoint ``address``. No effect if it is monitored already."""
        self._want(peer, address)

    def forget(self, peer: int) -> None:
        """Stops monitoring ``peer``."""
        self._want(peer, None)

    def _want(self, peer: int, address: str | None) -> None:
        # The last for each peer counts: connecting to one that was forgotten and has ended would be a loss.
        self._wanted[peer] = address
        self._service.call_soon(self._update)

    def close(self, goodbye: str = "") -> None:
        """Stops monitoring and replying. Idempotent. The service must run until :meth:`join` returns.

        Args:
            goodbye: as for :meth:`HeartbeatListener.stop`.
        """
        self._service.call_soon(partial(self._close, goodbye))

    def join(self, deadline: Deadline) -> bool:
        """Waits until nothing is monitored. Returns whether that happened by ``deadline``."""
        return self._ended.wait_done(deadline.timeout())

    # ---- the thread -------------------------------------------------------------------------------------

    def _close(self, goodbye: str) -> None:
        self._closed = True
        self._listener.stop(goodbye)
        for watched in list(self._peers.values()):
            self._drop(watched)
        self._ended.set_result(None)

    def close_sockets(self) -> None:
        """Closes all sockets in this process (in a fork: its copies)."""
        self._listener.close()
        for watched in self._peers.values():
            if watched.socket is not None:
                watched.socket.close()

    def _update(self) -> None:
        while self._wanted and not self._closed:
            peer, address = self._wanted.popitem()
            known = self._peers.get(peer)
            if known is not None and known.address == address:
                continue
            if known is not None:
                self._drop(known)
            if address is not None:
                local = address.startswith("ipc://")
                suspect_after = self._timeouts.local if local else self._timeouts.remote / 2
                detector = FailureDetector(suspect_after, self._timeouts.frozen, MONOTONIC.now())
                watched = self._peers[peer] = _Peer(peer, address, detector)
                self._connect(watched)
        self._arm()

    def _arm(self) -> None:
        """Schedules the next ping or attempt to connect."""
        self._alarm.set(min([watched.next_due for watched in self._peers.values()], default=math.inf))

    # ---- watching ---------------------------------------------------------------------------------------

    def _do_due(self) -> None:
        now = MONOTONIC.now()
        for watched in [c for c in self._peers.values() if c.next_due <= now]:
            self._read(watched)  # this thread may have been stopped: replies come before judgement
            if self._peers.get(watched.peer) is not watched:
                continue
            watched.next_due = now + watched.detector.interval
            change = watched.detector.tick(now)
            silent = now - watched.detector.last_reply_at
            if self._is_unreachable(watched):
                seconds = watched.detector.silence
                seen = f"{_endpoint(watched)} has accepted no connection for {seconds:.1f} s"
                self._lose(
                    watched, f"its host is out of reach ({seen}{watched.last_error}; {_hint(watched)})"
                )
            elif change is LivenessChange.FROZEN:
                self._lose(watched, f"its process has not replied for {silent:.0f} s, though it exists")
            elif change is LivenessChange.SUSPECTED:
                self._notify(self._suspected, watched.peer, silent)
            if watched.peer not in self._peers:
                continue
            if watched.socket is None:
                self._connect(watched)
            elif watched.authenticated:
                write(watched.socket, PING)  # an error shows at the next read
                self._record(watched.peer, True)
        self._arm()

    def _record(self, peer: int, outgoing: bool) -> None:
        """Shows a heartbeat to what traces them."""
        on_heartbeat = self._on_heartbeat()
        if on_heartbeat is not None:
            on_heartbeat(peer, outgoing)

    def _is_unreachable(self, watched: _Peer) -> bool:
        """Whether its kernel has not even accepted a connection. (It does if the process is only frozen.)"""
        if watched.local or watched.received or watched.detector.silence < self._timeouts.remote:
            return False
        try:
            return watched.socket is None or not watched.socket.getpeername()
        except OSError:
            return True

    def _connect(self, watched: _Peer) -> None:
        """Starts to connect. The socket reports the outcome."""
        watched.next_due = MONOTONIC.now() + watched.detector.interval
        watched.received, watched.nonce, watched.authenticated = b"", b"", False
        try:
            if watched.local:
                opened = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
                target: Any = unix_name(watched.address)
            else:
                target = host_and_port(watched.address.removeprefix(SCHEME))
                opened = sockets.socket(
                    sockets.AF_INET6 if ":" in target[0] else sockets.AF_INET, sockets.SOCK_STREAM
                )
                self._set_tcp_timeout(opened)
        except OSError as e:
            logger.warning("%s cannot watch worker %d: %s", self._name, watched.peer, e)
            # This process has no descriptor, which is no fault of the peer.
            watched.detector.restart(MONOTONIC.now())
            return
        opened.setblocking(False)
        watched.socket = opened
        error = opened.connect_ex(target)
        if error in (0, errno.EINPROGRESS):
            self._service.watch(opened.fileno(), READ, lambda _: self._on_readable(watched))
        else:
            self._on_broken(watched, error, connecting=True)

    def _set_tcp_timeout(self, opened: sockets.socket) -> None:
        """Makes the kernel give up in time on a host that acknowledges nothing."""
        opened.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
        if hasattr(sockets, "TCP_USER_TIMEOUT"):
            # Less the interval of pings, a sixth, and as long for the attempt to connect that follows.
            seconds = self._timeouts.remote * 4 / 6
            opened.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, int(seconds * 1000))

    def _on_readable(self, watched: _Peer) -> None:
        """Handles data from a peer: the token, a reply, or the end of the connection."""
        self._read(watched)
        self._arm()

    def _read(self, watched: _Peer) -> None:
        if watched.socket is None:
            return
        try:
            data = watched.socket.recv(PINGS_AT_ONCE)
        except BlockingIOError:
            return
        except OSError as e:
            self._on_broken(watched, e.errno or 0, connecting=not watched.received)
            return
        if not data:
            self._on_broken(watched, 0, connecting=False)
            return
        if not watched.authenticated:
            if not self._continue_handshake(watched, data):
                return
            data = watched.received[TOKEN_SIZE + CHALLENGE_SIZE + PROOF_SIZE :]
        watched.goodbye += data if watched.goodbye else b"".join(data.partition(GOODBYE)[1:])
        self._record(watched.peer, False)
        watched.refusals.clear()
        if watched.detector.on_reply(MONOTONIC.now()) is LivenessChange.RECOVERED:
            self._notify(self._suspected, watched.peer, 0.0)

    def _continue_handshake(self, watched: _Peer, data: bytes) -> bool:
        """Returns whether the peer has proven to be of this job. It is lost if another process replies."""
        assert watched.socket is not None
        watched.received += data
        received, size = watched.received, TOKEN_SIZE + CHALLENGE_SIZE
        greeting, proof = received[:size], received[size : size + PROOF_SIZE]
        if len(greeting) == size and not watched.nonce:
            watched.nonce = secrets.token_bytes(NONCE_SIZE)
            write(watched.socket, watched.nonce + prove(self._listener.key, OF_PEER, greeting, watched.nonce))
        if len(proof) == PROOF_SIZE:
            expected = prove(self._listener.key, OF_LISTENER, greeting, watched.nonce)
            watched.authenticated = hmac.compare_digest(proof, expected)
        wrong = len(proof) == PROOF_SIZE and not watched.authenticated
        if wrong or (watched.token and not watched.token.startswith(greeting[:TOKEN_SIZE])):
            self._lose(watched, f"another process listens at {watched.address.rpartition('/')[0]} now")
            return False
        return watched.authenticated

    def _on_broken(self, watched: _Peer, error: int, *, connecting: bool) -> None:
        """Handles a connection that broke or could not be opened."""
        self._disconnect(watched)
        now = MONOTONIC.now()
        if error == errno.ECONNREFUSED or (watched.local and error == errno.ENOENT):
            if watched.on_this_host:
                refused = "" if watched.local else f", as {_endpoint(watched)} refuses connections"
                self._lose(watched, f"its process has ended{refused}", ended=True)
            elif (seconds := watched.refusals.refused(now)) >= self._timeouts.refused:
                self._lose(
                    watched,
                    f"{_endpoint(watched)} has refused connections for {seconds:.1f} s; {_hint(watched)}",
                )
            else:
                watched.next_due = now + RETRY_SECONDS
        elif error in _UNREACHABLE_ERRNOS:
            watched.last_error = f", {os.strerror(error)}"
            # An interface that is down fails an attempt at once. Few attempts could all meet moments at which
            # it is, though messages arrive in between.
            seconds = min(watched.detector.interval, RETRY_SECONDS) if connecting else RECONNECT_SECONDS
            watched.next_due = now + seconds
        elif connecting:
            watched.next_due = now + watched.detector.interval  # its backlog is full: the peer is alive
        else:
            watched.next_due = now + RECONNECT_SECONDS

    def _disconnect(self, watched: _Peer) -> None:
        opened, watched.socket = watched.socket, None
        if opened is not None:
            self._service.unwatch(opened.fileno())
            opened.close()

    def _drop(self, watched: _Peer) -> None:
        self._disconnect(watched)
        del self._peers[watched.peer]

    def _lose(self, watched: _Peer, why: str, *, ended: bool = False) -> None:
        self._drop(watched)
        silent = MONOTONIC.now() - watched.detector.last_reply_at
        reason = watched.goodbye.removeprefix(GOODBYE).decode(errors="replace")
        self._lost(watched.peer, reason or f"{why} (last heard of {silent:.1f} s before)", ended)

    def _notify(self, callback: OnSuspected, peer: int, seconds: float) -> None:
        try:
            callback(peer, seconds)
        except Exception:
            logger.exception("the callback for worker %d (silent for %.1f s) failed", peer, seconds)


def _endpoint(watched: _Peer) -> str:
    return watched.address.removeprefix(SCHEME).rpartition("/")[0]


def _hint(watched: _Peer) -> str:
    host = _endpoint(watched).rpartition(":")[0]
    return f"if it is up, run `zmqgrad doctor --listen` there and `zmqgrad doctor --peer {host}` here"


_UNREACHABLE_ERRNOS = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN))
