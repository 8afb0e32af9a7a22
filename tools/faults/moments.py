"""Runs a function in a process at the moment when it first sends or receives a message of a type.

The tap of the transport shows a worker's message after it was sent, a store's query and reply before, and
each received message before it is handled. The moment before a worker sends is found by wrapping the
mailbox's ``send``. ("After handling" is the moment before the next message is sent.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

from tools.faults.model import AFTER_SENDING, AT_STEP, BEFORE_SENDING, ON_RECEIPT, Moment
from zmqgrad.transport import tap
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.tap import Identity, Tapped, Tracer
from zmqgrad.wire.messages import MessageType


class Moments:
    """A recorder that calls ``strike`` once, in the thread that sends or receives, at moment ``wanted``.

    Nothing happens before :meth:`arm`. The seen moments are in ``seen``.
    """

    def __init__(self, wanted: Moment | None, strike: Callable[[], None]) -> None:
        self.seen: set[Moment] = set()
        self.on_message: Callable[[], None] | None = None
        """Called with each received message: makes a consumer slow."""
        self._wanted, self._strike = wanted, strike
        self._armed = False
        self._lock = threading.Lock()

    def arm(self) -> None:
        """From now on the moment counts."""
        self._armed = True

    def reach(self, when: str, what: int | str) -> None:
        """A message of type ``what`` is sent or received, or a step of this name is made."""
        if not self._armed:
            return
        moment = Moment(when, what if isinstance(what, str) else MessageType(what).name)
        self.seen.add(moment)
        if moment == self._wanted:
            with self._lock:
                first, self._wanted = self._wanted is not None, None
            if first:
                self._strike()

    def attach(self, identity: Identity) -> Tracer:
        """As :class:`~zmqgrad.transport.tap.Recorder`."""
        return cast("Tracer", _Tap(self, AFTER_SENDING if identity.role == tap.WORKER else BEFORE_SENDING))

    def in_child(self) -> None:
        """Children are not the victim."""

    def install(self) -> None:
        """Hook this process."""
        tap.activate(self)
        send = ZmqMailbox.send

        def send_at_moment(mailbox: ZmqMailbox, peer: int, message: Any, *args: Any, **kwargs: Any) -> None:
            self.reach(BEFORE_SENDING, message.TYPE)
            send(mailbox, peer, message, *args, **kwargs)

        ZmqMailbox.send = send_at_moment  # type: ignore[assignment]


class _Tap:
    """A tracer that only taps."""

    records_arguments = records_heartbeats = False

    def __init__(self, moments: Moments, sent: str) -> None:
        self._moments, self._sent = moments, sent
        self.tap = tap.observer(self._note)

    def _note(self, tapped: Tapped) -> None:
        self._moments.reach(self._sent if tapped.outgoing else ON_RECEIPT, tapped.envelope.type)
        if self._moments.on_message is not None and not tapped.outgoing:
            self._moments.on_message()

    def rendezvous_step(self, round_number: int, action: str, participants: int, waiting: int) -> None:
        self._moments.reach(AT_STEP, action)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None
