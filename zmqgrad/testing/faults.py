"""Faults between mailboxes in memory: selected by message type, counted, active inside a ``with`` block.

    with network.drop(MessageType.RREF_ACK, times=2):
        ...                                  # the first two acknowledgements are lost
    with network.hold(MessageType.CALL, target=1) as held:
        held.wait()                          # a call has been sent and is kept back
        ...
        held.release()

A fault sees each message once, when it is sent, and decides what is forwarded in its place. The end of the
``with`` block ends the fault and delivers what it kept back. No fault depends on time: a delay is counted in
messages, so a test that passes once passes always.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Message, MessageType

if TYPE_CHECKING:
    from zmqgrad.testing.network import MemoryNetwork

WAIT_SECONDS = 10.0
"""Default timeout of waits."""

Workers = int | Collection[int] | None
"""One worker id, several, or None for all."""

F = TypeVar("F", bound="Fault")


class InFlightMessage(NamedTuple):
    """A message between two mailboxes.

    ``frames`` is what the receiver decodes, ``size`` the number of bytes. ``message`` is for inspection only.
    """

    envelope: Envelope
    target: int
    endpoint: str
    message: Message
    size: int
    frames: tuple[bytearray, ...]

    def copy(self) -> InFlightMessage:
        """Return a copy with frames of its own."""
        return self._replace(frames=tuple(bytearray(f) for f in self.frames))

    def __str__(self) -> str:
        e = self.envelope
        return f"{e.source} -> {self.target} {MessageType(e.type).name} #{e.message_id} {self.size} B"


class Fault:
    """A fault, as a context manager. ``caught`` lists the messages that it affected, oldest first.

    Args:
        network: whose messages it affects.
        kind: type of the affected messages; None: all types.
        times: how many messages it affects; None: no limit.
        source: the senders.
        target: the receivers.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        kind: MessageType | None = None,
        times: int | None = None,
        source: Workers = None,
        target: Workers = None,
    ) -> None:
        self._network = network
        self._kind = kind
        self._left = times
        self._source = _as_set(source)
        self._target = _as_set(target)
        self._held: list[InFlightMessage] = []
        self.caught: list[InFlightMessage] = []

    def forward(self, message: InFlightMessage) -> list[InFlightMessage]:
        """Return what is forwarded when ``message`` is sent. Called with the network's lock held."""
        if not self._matches(message):
            return [message]
        if self._left is not None:
            self._left -= 1
        self.caught.append(message)
        self._network.changed.notify_all()
        return self._apply(message)

    def _matches(self, message: InFlightMessage) -> bool:
        return (
            self._left != 0
            and self._kind in (None, message.envelope.type)
            and (self._source is None or message.envelope.source in self._source)
            and (self._target is None or message.target in self._target)
        )

    def _apply(self, message: InFlightMessage) -> list[InFlightMessage]:
        """Return what is forwarded instead of ``message``, which matches."""
        raise NotImplementedError

    def choose(self, target: int, queued: int) -> int:
        """Return the index of the message that ``target`` receives next, of ``queued`` (0: the oldest)."""
        return 0

    def wait(self, count: int = 1, timeout: float = WAIT_SECONDS) -> None:
        """Wait until the fault has affected ``count`` messages.

        Raises:
            TimeoutError: after ``timeout`` seconds.
        """
        with self._network.lock:
            if not self._network.changed.wait_for(lambda: len(self.caught) >= count, timeout):
                raise TimeoutError(f"{self!r} within {timeout} s; waited for {count}")

    def __enter__(self: F) -> F:
        self._network.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._network.lock:
            self._network.end(self)
            self._deliver_held(None)

    def _deliver_held(self, count: int | None) -> None:
        delivered = self._held[:count]
        del self._held[:count]
        for message in delivered:
            self._network.deliver(message)

    def __repr__(self) -> str:
        what = "any message" if self._kind is None else self._kind.name
        return f"<{type(self).__name__} of {what}: caught {len(self.caught)}>"


class Drop(Fault):
    """Loses messages."""

    def _apply(self, message: InFlightMessage) -> list[InFlightMessage]:
        return []


class Duplicate(Fault):
    """Delivers messages twice."""

    def _apply(self, message: InFlightMessage) -> list[InFlightMessage]:
        return [message, message.copy()]


class Hold(Fault):
    """Keeps messages back until :meth:`release`. Other messages overtake them."""

    def _apply(self, message: InFlightMessage) -> list[InFlightMessage]:
        self._held.append(message)
        return []

    def release(self, count: int | None = None) -> None:
        """Deliver the ``count`` oldest messages (None: all), in the order in which they were sent."""
        with self._network.lock:
            self._deliver_held(count)


class Delay(Hold):
    """Delivers each message after ``by`` later ones."""

    def __init__(
        self,
        network: MemoryNetwork,
        kind: MessageType | None,
        times: int | None,
        source: Workers,
        target: Workers,
        by: int,
    ) -> None:
        super().__init__(network, kind, times, source, target)
        self._by = by
        self._overtaken: list[int] = []  # for each held message, by how many

    def forward(self, message: InFlightMessage) -> list[InFlightMessage]:
        forwarded = super().forward(message)
        if not forwarded:
            self._overtaken.append(0)
            return forwarded
        self._overtaken = [n + 1 for n in self._overtaken]
        due = sum(n >= self._by for n in self._overtaken)
        forwarded += self._held[:due]
        del self._held[:due], self._overtaken[:due]
        return forwarded

    def release(self, count: int | None = None) -> None:
        with self._network.lock:
            del self._overtaken[:count]
            super().release(count)


class Partition(Fault):
    """Loses all messages between two sides, in both directions. ``other``: None for all other workers."""

    def __init__(self, network: MemoryNetwork, one: int | Collection[int], other: Workers = None) -> None:
        super().__init__(network)
        self._one = _as_set(one) or frozenset()
        self._other = _as_set(other)

    def _matches(self, message: InFlightMessage) -> bool:
        ends = message.envelope.source, message.target
        return self._crosses(*ends) or self._crosses(*reversed(ends))

    def _crosses(self, here: int, there: int) -> bool:
        if self._other is None:
            return here in self._one and there not in self._one
        return here in self._one and there in self._other

    def _apply(self, message: InFlightMessage) -> list[InFlightMessage]:
        return []


class Reorder(Fault):
    """Delivers the messages that are queued at a mailbox in a random order, drawn from ``seed``.

    It keeps nothing back, so no exchange can stall. ``caught`` stays empty.
    """

    def __init__(self, network: MemoryNetwork, seed: int, window: int = 8, target: Workers = None) -> None:
        super().__init__(network, times=0, target=target)
        self._random = random.Random(seed)
        self._window = window

    def choose(self, target: int, queued: int) -> int:
        if self._target is not None and target not in self._target:
            return 0
        return self._random.randrange(min(queued, self._window))


def _as_set(workers: Workers) -> frozenset[int] | None:
    if workers is None:
        return None
    return frozenset((workers,) if isinstance(workers, int) else workers)
