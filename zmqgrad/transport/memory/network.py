"""The network between mailboxes in memory: carries parcels past the faults, and remembers them.

Faults are begun by its methods, and end with the ``with`` that they stand in; the first to begin sees each
parcel first. One lock guards the network and all of its mailboxes, so that a test can wait for any state of
the whole.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from zmqgrad.transport.memory.faults import (
    WAIT_SECONDS,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Hold,
    Parcel,
    Partition,
    Reorder,
    Workers,
)
from zmqgrad.wire.messages import MessageType

if TYPE_CHECKING:
    from zmqgrad.transport.memory.mailbox import MemoryMailbox

RECORD = 10_000
"""Parcels that a network remembers."""


class MemoryNetwork:
    """Joins mailboxes. ``carried`` lists the last parcels sent, less their frames; lost ones too."""

    def __init__(self) -> None:
        self.carried: deque[Parcel] = deque(maxlen=RECORD)
        self.lock = threading.RLock()  # guards all here and in the mailboxes
        self.changed = threading.Condition(self.lock)
        self._faults: list[Fault] = []
        self._mailboxes: dict[str, MemoryMailbox] = {}
        self._numbers = itertools.count()
        self._lost = 0

    def join(self, mailbox: MemoryMailbox) -> str:
        """Take ``mailbox`` in; gives its endpoint."""
        with self.changed:
            endpoint = f"memory://{next(self._numbers)}"
            self._mailboxes[endpoint] = mailbox
            return endpoint

    def knows(self, endpoint: str) -> bool:
        """Is, or was, there a mailbox at ``endpoint``?"""
        with self.changed:
            return endpoint in self._mailboxes

    def carry(self, parcel: Parcel) -> None:
        """Send ``parcel`` on its way, past the faults."""
        with self.changed:
            self.carried.append(parcel._replace(frames=()))
            going = [parcel]
            for fault in self._faults:
                going = [q for p in going for q in fault.pass_on(p)]
            for p in going:
                self.deliver(p)
            self.changed.notify_all()

    def deliver(self, parcel: Parcel) -> None:
        """Put ``parcel`` before its mailbox. Called with ``changed`` held."""
        if not self._mailboxes[parcel.endpoint].put(parcel.frames):
            self._lost += 1

    def choose(self, target: int, waiting: int) -> int:
        """Which of the ``waiting`` parcels should mailbox ``target`` take next? Called with the lock held."""
        for fault in self._faults:
            chosen = fault.choose(target, waiting)
            if chosen:
                return chosen
        return 0

    def begin(self, fault: Fault) -> None:
        """Let ``fault`` happen from now on, after those that began before."""
        with self.changed:
            self._faults.append(fault)

    def end(self, fault: Fault) -> None:
        """Let it happen no more."""
        with self.changed:
            self._faults.remove(fault)

    def inject(self, endpoint: str, frames: Sequence[bytes]) -> None:
        """Put raw ``frames`` before a mailbox, as a stranger on the port would."""
        with self.changed:
            self._mailboxes[endpoint].put(tuple(bytearray(f) for f in frames))

    def drop(
        self,
        kind: MessageType | None = None,
        times: int | None = None,
        *,
        source: Workers = None,
        target: Workers = None,
    ) -> Drop:
        """Lose the next ``times`` (None: all) parcels of type ``kind`` from ``source`` to ``target``."""
        return Drop(self, kind, times, source, target)

    def duplicate(
        self,
        kind: MessageType | None = None,
        times: int | None = None,
        *,
        source: Workers = None,
        target: Workers = None,
    ) -> Duplicate:
        """Deliver them twice."""
        return Duplicate(self, kind, times, source, target)

    def hold(
        self,
        kind: MessageType | None = None,
        times: int | None = None,
        *,
        source: Workers = None,
        target: Workers = None,
    ) -> Hold:
        """Keep them back until released: freezes a conversation at one step."""
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
        """Let ``by`` parcels that are sent later go past each of them."""
        return Delay(self, kind, times, source, target, by)

    def reorder(self, seed: int, window: int = 8, *, target: Workers = None) -> Reorder:
        """Deliver what waits before a mailbox in an order drawn from ``seed``, not in that of sending."""
        return Reorder(self, seed, window, target)

    def partition(self, one: int | Collection[int], other: Workers = None) -> Partition:
        """Lose everything between ``one`` and ``other`` (None: everybody else), either way."""
        return Partition(self, one, other)

    def wait_carried(self, kind: MessageType, count: int = 1, timeout: float = WAIT_SECONDS) -> None:
        """Wait until ``count`` messages of type ``kind`` have been sent (as far as ``carried`` remembers).

        Raises:
            TimeoutError: if they have not within ``timeout`` seconds.
        """
        self._wait(lambda: sum(p.envelope.type == kind for p in self.carried) >= count, timeout)

    def wait_quiet(self, timeout: float = WAIT_SECONDS) -> None:
        """Wait until no message waits before an open mailbox and no handler runs.

        Raises:
            TimeoutError: if that is not so within ``timeout`` seconds.
        """
        self._wait(lambda: not any(m.busy() for m in self._mailboxes.values()), timeout)

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        with self.changed:
            if not self.changed.wait_for(condition, timeout):
                raise TimeoutError(f"not within {timeout} s on {self!r}")

    def statistics(self) -> dict[str, int]:
        """Mailboxes open, and parcels lost because the mailbox at the other end was closed."""
        with self.changed:
            return {"open": sum(m.is_open for m in self._mailboxes.values()), "lost": self._lost}

    def __repr__(self) -> str:
        last = "; ".join(str(p) for p in list(self.carried)[-3:]) or "nothing"
        return f"<MemoryNetwork of {len(self._mailboxes)} mailboxes; last carried: {last}>"
