"""All sessions of a mailbox, and their timeouts. :mod:`~zmqgrad.transport.session` has the protocol.

Threads: the reading thread handles messages and connection events; the timer's thread sends acknowledgements
and handles timeouts. The timer is armed for the earliest of them only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from zmqgrad.errors import ZmqgradError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.transport.session import Incoming, Verdict
from zmqgrad.transport.session_socket import Hooks, SessionSocket
from zmqgrad.wire.frames import Envelope

if TYPE_CHECKING:
    from zmqgrad.transport.links import Link
    from zmqgrad.transport.reader import Reader

logger = logging.getLogger(__name__)

MIN_SECONDS = 0.001
"""The timer is not armed again for an event that is earlier by less than this."""

MAX_INCOMING = 1 << 17
"""Maximum number of incarnations with a receiving half; beyond it, the oldest is dropped. A job has at most
65,536 workers."""

PROMPT_ACK_BYTES = 1 << 20
PROMPT_ACK_MESSAGES = 64
"""Acknowledgements of this much are applied at once; others with the next message sent, or by the timer."""


class _Peer:
    """Both halves of the session with one incarnation of a peer."""

    __slots__ = ("incarnation", "incoming", "session")

    def __init__(self, incarnation: int, incoming: Incoming) -> None:
        self.incarnation = incarnation
        self.incoming = incoming
        self.session: SessionSocket | None = None

    def attach(self, session: SessionSocket) -> None:
        """Joins ``session`` as the sending half if it sends to this incarnation."""
        if session.target in (0, self.incarnation):
            self.session = session
            session.incoming = self.incoming


class Sessions:
    """Both halves of all sessions of one mailbox.

    Args:
        name: of the worker.
        incarnation: of the worker; messages for another one are not delivered.
        ack: an encoded message that carries only an acknowledgement.
        acknowledge: sends an acknowledgement to a peer through its :class:`SessionSocket`; must not block.
    """

    def __init__(self, name: str, incarnation: int, ack: bytes, acknowledge: Callable[[int], None]) -> None:
        self.misdirected = 0
        self._name = name
        self._incarnation = incarnation
        self._ack = ack
        self._acknowledge = acknowledge
        self._timer: ServiceThread | None = None
        self._reader: Reader | None = None
        self._peers: dict[int, _Peer] = {}  # by number, each in its latest incarnation
        self._incoming: dict[tuple[int, int], Incoming] = {}  # by peer and incarnation
        self._outgoing: dict[int, SessionSocket] = {}
        self._channels: set[SessionSocket] = set()
        self.hooks = Hooks(self._watch, self._unwatch)
        self.armed_at = math.inf
        """When the timer fires. For an earlier event, :meth:`arm` must be called."""
        self._closed = False

    def start(self, timer: ServiceThread, reader: Reader) -> None:
        """Sets the timer and the reader. Must be called before the first session opens."""
        self._timer, self._reader = timer, reader

    def open(
        self, link: Link, endpoint: str, target: int, make_socket: Callable[[], zmq.Socket[bytes]]
    ) -> SessionSocket:
        """Opens a session to ``target``, an incarnation of a peer. The caller holds the lock of ``link``."""
        peer = link.peer
        session = SessionSocket(
            self._name, endpoint, target, link.lock, make_socket, self.hooks, self._ack, MONOTONIC.now()
        )
        self._outgoing[peer] = session
        known = self._peers.get(peer)
        if known is not None:
            known.attach(session)
        return session

    def drop(self, peer: int) -> None:
        """Forgets the session to ``peer``; it gets no acknowledgements any more."""
        self._outgoing.pop(peer, None)
        known = self._peers.pop(peer, None)
        if known is not None:
            known.session = None
        for source, incarnation in list(self._incoming):
            if source == peer:
                del self._incoming[source, incarnation]

    def add_channel(self, channel: SessionSocket) -> None:
        """Handles the timeouts of ``channel`` from now on (:mod:`zmqgrad.transport.sealed`)."""
        self._channels.add(channel)

    def remove_channel(self, channel: SessionSocket) -> None:
        """Undoes :meth:`add_channel`. Idempotent."""
        self._channels.discard(channel)

    def _all_outgoing(self) -> list[SessionSocket]:
        return [*self._outgoing.values(), *self._channels.copy()]

    # ---- receiving --------------------------------------------------------------------------------------

    def receive(self, envelope: Envelope, size: int) -> bool:
        """Registers a received message of a session. Returns whether to deliver it. Reading thread only."""
        if envelope.target and envelope.target != self._incarnation:
            self.misdirected += 1
            return False
        peer = self._peers.get(envelope.source)
        if peer is None or peer.incarnation != envelope.incarnation:
            peer = self._find_peer(envelope)
        now = MONOTONIC.now()
        session = peer.session
        if session is not None and envelope.acknowledged > session.peer_acknowledged:
            session.peer_acknowledged = envelope.acknowledged
            outgoing = session.outgoing
            if (
                outgoing.behind
                or outgoing.size >= PROMPT_ACK_BYTES
                or session.peer_acknowledged - outgoing.acknowledged >= PROMPT_ACK_MESSAGES
            ):
                with session.lock:
                    session.apply_ack(now)
        if not envelope.sequence:
            return True
        incoming = peer.incoming
        verdict = incoming.receive(envelope.sequence, size, now)
        if incoming.due < self.armed_at:
            self.arm(incoming.due)
        return verdict is Verdict.DELIVER

    def _find_peer(self, envelope: Envelope) -> _Peer:
        """Returns the sender of a message that the worker id alone does not identify."""
        source, incarnation = envelope.source, envelope.incarnation
        incoming = self._incoming.get((source, incarnation))
        if incoming is not None:
            return _Peer(incarnation, incoming)  # from an older incarnation
        if len(self._incoming) >= MAX_INCOMING:
            del self._incoming[next(iter(self._incoming))]
        incoming = self._incoming[source, incarnation] = Incoming()
        peer = self._peers[source] = _Peer(incarnation, incoming)
        session = self._outgoing.get(source)
        if session is not None:
            peer.attach(session)
        return peer

    # ---- timeouts ----------------------------------------------------------------------------------------

    def arm(self, due: float) -> None:
        """Makes the timer fire at ``due`` or earlier."""
        if due < self.armed_at - MIN_SECONDS and not self._closed and self._timer is not None:
            self.armed_at = due
            self._timer.call_later(max(0.0, due - MONOTONIC.now()), self._on_time)

    def _on_time(self) -> None:
        self.armed_at = math.inf
        if self._closed:
            return
        now = MONOTONIC.now()
        due = math.inf
        for (peer, _), incoming in list(self._incoming.items()):
            if incoming.due <= now:
                incoming.acknowledgement()  # even if sending fails: a duplicate schedules it again
                try:
                    self._acknowledge(peer)
                except ZmqgradError as e:
                    logger.debug("%s cannot acknowledge what worker %d sent: %s", self._name, peer, e)
            due = min(due, incoming.due)
        for session in self._all_outgoing():
            with session.lock:
                session.on_time(now)
                due = min(due, session.next_due())
        self.arm(due)

    def _watch(self, fd: int, session: SessionSocket) -> None:
        assert self._reader is not None
        self._reader.watch(fd, partial(self._on_events, session))

    def _unwatch(self, fd: int) -> None:
        assert self._reader is not None
        self._reader.unwatch(fd)

    def _on_events(self, session: SessionSocket) -> None:
        with session.lock:
            session.on_events(MONOTONIC.now())
            due = session.next_due()
        self.arm(due)

    def close(self) -> None:
        """Ignores the timer from now on. Idempotent."""
        self._closed = True

    def statistics(self) -> dict[str, Any]:
        """Returns counts of messages kept, resent and received twice, and of broken connections."""
        outgoing = self._all_outgoing()
        incoming = list(self._incoming.values())
        return {
            "unacknowledged": sum(len(session.outgoing) for session in outgoing),
            "unacknowledged_bytes": sum(session.outgoing.size for session in outgoing),
            "reconnects": sum(session.reconnects for session in outgoing),
            "resends": sum(session.resends for session in outgoing),
            "duplicates": sum(session.duplicates for session in incoming),
            "gaps": sum(session.gaps for session in incoming),
            "misdirected": self.misdirected,
        }
