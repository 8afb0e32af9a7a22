"""The sessions of a mailbox: timeouts, and what is received (protocol: :mod:`~zmqgrad.transport.session`).

Threads: the reading thread handles messages and connection events; the timer's thread sends acknowledgements
and handles timeouts. The timer is armed for the earliest of them only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zmqgrad.errors import ZmqgradError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.runtime.service_thread import Alarm, ServiceThread
from zmqgrad.transport.session import Incoming
from zmqgrad.transport.session_socket import SessionSocket
from zmqgrad.wire.frames import Envelope

if TYPE_CHECKING:
    from zmqgrad.transport.links import Link
    from zmqgrad.transport.reader import Reader

logger = logging.getLogger(__name__)

MIN_SECONDS = 0.001
"""The timer is not armed again for an event that is earlier by less than this."""

MAX_INCARNATIONS = 16
"""Maximum number of incarnations of a peer with a receiving half; beyond it, the oldest is dropped."""

PROMPT_ACK_BYTES = 1 << 20
PROMPT_ACK_MESSAGES = 64
"""Acknowledgements of this much are applied at once; others with the next message sent, or by the timer."""


class Sessions:
    """The sessions of one mailbox: each link has its receiving halves, and the sending half.

    Args:
        name: of the worker.
        incarnation: of the worker; messages for another one are not delivered.
        ack: an encoded message that carries only an acknowledgement.
        acknowledge: sends an acknowledgement by a link; must not block.
    """

    links: Callable[[], list[Link]]
    """Returns all links."""
    reader: Reader
    """Polls the connections."""
    alarm: Alarm
    """Set to the earliest timeout."""

    def __init__(self, name: str, incarnation: int, ack: bytes, acknowledge: Callable[[Link], None]) -> None:
        self.misdirected = 0
        self.ack = ack
        self.sockets: dict[SessionSocket, None] = {}
        """Those that are open, oldest first: whatever is done for all of them has an order."""
        self.name = name
        self.incarnation = incarnation
        self._acknowledge = acknowledge
        self._closed = False

    def start(self, timer: ServiceThread, reader: Reader) -> None:
        """Sets the timer and the reader. Must be called before the first session opens."""
        self.alarm, self.reader = Alarm(self._on_time, timer, MIN_SECONDS), reader

    # ---- receiving --------------------------------------------------------------------------------------

    def receive(self, link: Link, envelope: Envelope, size: int) -> bool:
        """Registers a received message of a session. Returns whether to deliver it. Reading thread only."""
        if envelope.target and envelope.target != self.incarnation:
            self.misdirected += 1
            return False
        incoming = link.incoming.get(envelope.incarnation) or _hear(link, envelope.incarnation)
        now = MONOTONIC.now()
        session = link.session
        if (
            session is not None
            and session.incoming is incoming
            and session.peer_acknowledged < envelope.acknowledged < session.outgoing.next_sequence
        ):
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
        is_next = incoming.receive(envelope.sequence, size, now)
        self.alarm.set(incoming.due)
        return is_next

    # ---- timeouts ----------------------------------------------------------------------------------------

    def _on_time(self) -> None:
        if self._closed:
            return
        now = MONOTONIC.now()
        due = math.inf
        for link in self.links():
            for incoming in list(link.incoming.values()):
                if incoming.due <= now:
                    incoming.acknowledgement()  # even if sending fails: a duplicate schedules it again
                    try:
                        self._acknowledge(link)
                    except ZmqgradError as e:
                        logger.debug("%s cannot acknowledge what worker %d sent: %s", self.name, link.peer, e)
                due = min(due, incoming.due)
        for session in self.sockets.copy():
            with session.lock:
                session.on_time(now)
                due = min(due, session.next_due())
        self.alarm.set(due)

    def close(self) -> None:
        """Ignores the timer from now on. Idempotent."""
        self._closed = True

    def statistics(self) -> dict[str, Any]:
        """Returns counts of messages kept, resent and received twice, and of broken connections."""
        outgoing = self.sockets.copy()
        incoming = [each for link in self.links() for each in list(link.incoming.values())]
        return {
            "unacknowledged": sum(len(session.outgoing) for session in outgoing),
            "unacknowledged_bytes": sum(session.outgoing.size for session in outgoing),
            "reconnects": sum(session.reconnects for session in outgoing),
            "resends": sum(session.resends for session in outgoing),
            "duplicates": sum(session.duplicates for session in incoming),
            "gaps": sum(session.gaps for session in incoming),
            "misdirected": self.misdirected,
        }


def _hear(link: Link, incarnation: int) -> Incoming:
    """Begins the receiving half for the first message of an incarnation of a peer."""
    if len(link.incoming) >= MAX_INCARNATIONS:
        del link.incoming[next(iter(link.incoming))]
    incoming = link.incoming[incarnation] = Incoming()
    session = link.session  # read afterwards: it may be opening just now, and looks for this one
    if session is not None and session.target in (0, incarnation):
        session.incoming = incoming
    return incoming
