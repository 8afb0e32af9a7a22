"""The sessions of a mailbox: what was received of whom, and who does what at what time.

See :mod:`~zmqgrad.transport.session` for the protocol. Messages and events come in the thread that reads,
acknowledgements and timeouts in the timer's; the latter is armed for the earliest of them only.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import zmq

from zmqgrad.errors import ZmqgradError
from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.transport.base import Timer
from zmqgrad.transport.session import Incoming, Verdict
from zmqgrad.transport.session_socket import Hooks, SessionSocket
from zmqgrad.wire.frames import Envelope

logger = logging.getLogger(__name__)

MIN_SECONDS = 0.001
"""Not armed again for what is due so little earlier."""


class Watcher(Protocol):
    """Who polls file descriptors."""

    def watch(self, number: int, readable: Callable[[], None]) -> None:
        """Call ``readable`` when the descriptor is. From any thread."""
        ...

    def unwatch(self, number: int) -> None:
        """Not any more."""
        ...


MAX_INCOMING = 1 << 17
"""Incarnations whose messages are counted; then the first is dropped. A job has at most 65,536 workers."""

PROMPT_BYTES = 1 << 20
PROMPT_MESSAGES = 64
"""Acknowledgements of so much are taken in at once; others with the next message that is sent, or in time."""


class _Peer:
    """Both halves of the sessions with one incarnation of a peer."""

    __slots__ = ("incarnation", "incoming", "session")

    def __init__(self, incarnation: int, incoming: Incoming) -> None:
        self.incarnation = incarnation
        self.incoming = incoming
        self.session: SessionSocket | None = None

    def meet(self, session: SessionSocket) -> None:
        """``session`` sends to this peer, perhaps to another incarnation."""
        if session.target in (0, self.incarnation):
            self.session = session
            session.incoming = self.incoming


class Sessions:
    """Both halves of all sessions of one mailbox.

    Args:
        name: of the worker.
        incarnation: of the worker: what is meant for another is not delivered.
        ack: the message that carries nothing but an acknowledgement.
        acknowledge: sends an acknowledgement to a peer by its :class:`SessionSocket`.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        ack: bytes,
        acknowledge: Callable[[int], None],
        clock: Clock = MONOTONIC,
    ) -> None:
        self.misdirected = 0
        self._name = name
        self._incarnation = incarnation
        self._ack = ack
        self._acknowledge = acknowledge
        self._clock = clock
        self._timer: Timer | None = None
        self._watcher: Watcher | None = None
        self._peers: dict[int, _Peer] = {}  # by number, each in its latest incarnation
        self._incoming: dict[tuple[int, int], Incoming] = {}  # by peer and incarnation
        self._outgoing: dict[int, SessionSocket] = {}
        self.armed_at = math.inf
        """When the timer will look after all. Whoever knows of something due before calls :meth:`arm`."""
        self._closed = False

    def start(self, timer: Timer, watcher: Watcher) -> None:
        """Before the first session."""
        self._timer, self._watcher = timer, watcher

    def open(
        self,
        peer: int,
        endpoint: str,
        target: int,
        epoch: int,
        lock: threading.Lock,
        make_socket: Callable[[], zmq.Socket[bytes]],
    ) -> SessionSocket:
        """Begin to send to ``target``, an incarnation of ``peer``. The caller holds ``lock``."""
        session = SessionSocket(
            self._name,
            endpoint,
            target,
            epoch,
            lock,
            make_socket,
            Hooks(self._watch, self._unwatch),
            self._ack,
            self._clock.now(),
        )
        self._outgoing[peer] = session
        known = self._peers.get(peer)
        if known is not None:
            known.meet(session)
        return session

    def drop(self, peer: int) -> None:
        """Nothing is sent to ``peer`` any more, acknowledgements neither."""
        self._outgoing.pop(peer, None)
        known = self._peers.get(peer)
        if known is not None:
            known.session = None
        for (source, _), incoming in list(self._incoming.items()):
            if source == peer:
                incoming.acknowledgement()

    # ---- receiving --------------------------------------------------------------------------------------

    def receive(self, envelope: Envelope, size: int) -> bool:
        """In the thread that reads: takes in a message of a session. Returns whether to deliver it."""
        if envelope.target and envelope.target != self._incarnation:
            self.misdirected += 1
            return False
        peer = self._peers.get(envelope.source)
        if peer is None or peer.incarnation != envelope.incarnation:
            peer = self._meet(envelope)
        now = self._clock.now()
        session = peer.session
        if session is not None and envelope.acknowledged > session.heard:
            session.heard = envelope.acknowledged
            outgoing = session.outgoing
            if (
                outgoing.behind
                or outgoing.size >= PROMPT_BYTES
                or session.heard - outgoing.acknowledged >= PROMPT_MESSAGES
            ):
                with session.lock:
                    session.take_in(now)
        if not envelope.sequence:
            return True
        incoming = peer.incoming
        verdict = incoming.receive(envelope.sequence, size, now)
        if incoming.due < self.armed_at:
            self.arm(incoming.due)
        return verdict is Verdict.DELIVER

    def _meet(self, envelope: Envelope) -> _Peer:
        """The sender of a message, which is not that of the last one by its number."""
        source, incarnation = envelope.source, envelope.incarnation
        incoming = self._incoming.get((source, incarnation))
        if incoming is not None:
            return _Peer(incarnation, incoming)  # what an older incarnation sent
        if len(self._incoming) >= MAX_INCOMING:
            del self._incoming[next(iter(self._incoming))]
        incoming = self._incoming[source, incarnation] = Incoming()
        peer = self._peers[source] = _Peer(incarnation, incoming)
        session = self._outgoing.get(source)
        if session is not None:
            peer.meet(session)
        return peer

    # ---- in time ----------------------------------------------------------------------------------------

    def arm(self, due: float) -> None:
        """Something is due then."""
        if due < self.armed_at - MIN_SECONDS and not self._closed and self._timer is not None:
            self.armed_at = due
            self._timer.call_later(max(0.0, due - self._clock.now()), self._on_time)

    def _on_time(self) -> None:
        self.armed_at = math.inf
        if self._closed:
            return
        now = self._clock.now()
        due = math.inf
        for (peer, _), incoming in list(self._incoming.items()):
            if incoming.due <= now:
                incoming.acknowledgement()  # whether it can be sent or not: a duplicate asks for it again
                try:
                    self._acknowledge(peer)
                except ZmqgradError as e:
                    logger.debug("%s cannot acknowledge what worker %d sent: %s", self._name, peer, e)
            due = min(due, incoming.due)
        for session in list(self._outgoing.values()):
            with session.lock:
                session.on_time(now)
                due = min(due, session.next_due())
        self.arm(due)

    def _watch(self, number: int, session: SessionSocket) -> None:
        assert self._watcher is not None
        self._watcher.watch(number, partial(self._on_events, session))

    def _unwatch(self, number: int) -> None:
        assert self._watcher is not None
        self._watcher.unwatch(number)

    def _on_events(self, session: SessionSocket) -> None:
        with session.lock:
            session.on_events(self._clock.now())
            due = session.next_due()
        self.arm(due)

    def close(self) -> None:
        """Nothing is due any more. Idempotent."""
        self._closed = True

    def statistics(self) -> dict[str, Any]:
        """Messages kept, resent, and received twice; broken connections."""
        outgoing = list(self._outgoing.values())
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
