"""The network between mailboxes in memory: forwards messages through the active faults, and records them.

Its methods create faults, which are active inside their ``with`` block; the first that began sees each
message first. One lock guards the network and all of its mailboxes, so that a test can wait for any state of
the whole.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from zmqgrad.testing.faults import (
    WAIT_SECONDS,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Hold,
    InFlightMessage,
    Partition,
    Reorder,
    Workers,
)
from zmqgrad.wire.messages import MessageType

if TYPE_CHECKING:
    from zmqgrad.testing.mailbox import MemoryMailbox

HISTORY_MESSAGES = 10_000
"""How many messages a network remembers."""


class MemoryNetwork:
    """Connects mailboxes. ``history`` lists the last messages sent, lost ones too, without their frames."""

    def __init__(self) -> None:
        self.history: deque[InFlightMessage] = deque(maxlen=HISTORY_MESSAGES)
        self.lock = threading.RLock()  # guards everything here and in the mailboxes
        self.changed = threading.Condition(self.lock)
        self._faults: list[Fault] = []
        self._mailboxes: dict[str, MemoryMailbox] = {}
        self._numbers = itertools.count()
        self._lost = 0

    def register(self, mailbox: MemoryMailbox) -> str:
        """Connect ``mailbox`` and return its endpoint."""
        with self.lock:
            endpoint = f"memory://{next(self._numbers)}"
            self._mailboxes[endpoint] = mailbox
            return endpoint

    def knows(self, endpoint: str) -> bool:
        """Return whether ``endpoint`` is that of a mailbox, open or closed."""
        with self.lock:
            return endpoint in self._mailboxes

    def send(self, message: InFlightMessage) -> None:
        """Forward ``message`` through the faults to its mailbox."""
        with self.lock:
            self.history.append(message._replace(frames=()))
            forwarded = [message]
            for fault in self._faults:
                forwarded = [q for p in forwarded for q in fault.forward(p)]
            for p in forwarded:
                self.deliver(p)
            self.changed.notify_all()

    def deliver(self, message: InFlightMessage) -> None:
        """Queue ``message`` at its mailbox. Called with ``lock`` held."""
        if not self._mailboxes[message.endpoint].enqueue(message.frames):
            self._lost += 1

    def choose(self, target: int, queued: int) -> int:
        """Return the index of the message that ``target`` receives next. Called with the lock held."""
        for fault in self._faults:
            chosen = fault.choose(target, queued)
            if chosen:
                return chosen
        return 0

    def begin(self, fault: Fault) -> None:
        """Activate ``fault``, after those that are active."""
        with self.lock:
            self._faults.append(fault)

    def end(self, fault: Fault) -> None:
        """Deactivate ``fault``."""
        with self.lock:
            self._faults.remove(fault)

    def inject(self, endpoint: str, frames: Sequence[bytes]) -> None:
        """Queue raw ``frames`` at a mailbox, as any process that connects to a port can."""
        with self.lock:
            self._mailboxes[endpoint].enqueue(tuple(bytearray(f) for f in frames))

    def drop(
        self,
        kind: MessageType | None = None,
        times: int | None = None,
        *,
        source: Workers = None,
        target: Workers = None,
    ) -> Drop:
        """Lose the next ``times`` messages of type ``kind`` from ``source`` to ``target`` (None: all)."""
        return Drop(self, kind, times, source, target)

    def duplicate(
        self,
        kind: MessageType | None = None,
        times: int | None = None,
        *,
        source: Workers = None,
        target: Workers = None,
    ) -> Duplicate:
        """Deliver the messages selected as by :meth:`drop` twice."""
        return Duplicate(self, kind, times, source, target)

    def hold(
        self,
        kind: MessageType | None = None,
        times: int | None = None,
        *,
        source: Workers = None,
        target: Workers = None,
    ) -> Hold:
        """Keep the messages selected as by :meth:`drop` back until released."""
        return Hold(self, kind, times, source, target)

    def delay(
        self,
        kind: MessageType | None = None,
        times: int | None = None,
        *,
        by: int = 1,
        source: Workers = None,
        target: Workers = None,
    ) -> Delay:
        """Deliver each of the messages selected as by :meth:`drop` after ``by`` later ones."""
        return Delay(self, kind, times, source, target, by)

    def reorder(self, seed: int, window: int = 8, *, target: Workers = None) -> Reorder:
        """Deliver the messages queued at a mailbox in an order drawn from ``seed``, ``window`` at a time."""
        return Reorder(self, seed, window, target)

    def partition(self, one: int | Collection[int], other: Workers = None) -> Partition:
        """Lose all messages between ``one`` and ``other`` (None: all other workers), in both directions."""
        return Partition(self, one, other)

    def wait_sent(self, kind: MessageType, count: int = 1, timeout: float = WAIT_SECONDS) -> None:
        """Wait until ``history`` contains ``count`` messages of type ``kind``.

        Raises:
            TimeoutError: after ``timeout`` seconds.
        """
        self._wait(lambda: sum(p.envelope.type == kind for p in self.history) >= count, timeout)

    def wait_quiet(self, timeout: float = WAIT_SECONDS) -> None:
        """Wait until no message is queued at an open mailbox and no handler runs.

        Raises:
            TimeoutError: after ``timeout`` seconds.
        """
        self._wait(lambda: not any(m.is_busy() for m in self._mailboxes.values()), timeout)

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        with self.lock:
            if not self.changed.wait_for(condition, timeout):
                raise TimeoutError(f"not within {timeout} s on {self!r}")

    def statistics(self) -> dict[str, int]:
        """Return the numbers of open mailboxes, and of messages lost because the receiver was closed."""
        with self.lock:
            return {"open": sum(m.is_open for m in self._mailboxes.values()), "lost": self._lost}

    def __repr__(self) -> str:
        last = "; ".join(str(p) for p in list(self.history)[-3:]) or "nothing"
        return f"<MemoryNetwork of {len(self._mailboxes)} mailboxes; last sent: {last}>"
