"""What can go wrong between two mailboxes in memory: by message type, counted, inside a ``with``.

    with network.drop(MessageType.RREF_ACK, times=2):
        ...                                  # the first two acknowledgements are lost
    with network.hold(MessageType.CALL, target=1) as held:
        held.wait()                          # a call is on its way, and goes no further
        ...
        held.release()

A fault sees each parcel once, as it is sent, and says what goes on from there. Leaving the ``with`` ends
the fault and lets go what it held back. Nothing here looks at a clock: "late" is counted in messages, so
that a test which passes once passes always.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

from zmqgrad.runtime.clock import Deadline
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Message, MessageType

WAIT_SECONDS = 10.0
"""How long the waits for tests wait, unless told otherwise."""

Workers = int | Collection[int] | None
"""One worker id, several, or (None) all."""

F = TypeVar("F", bound="Fault")


class Parcel(NamedTuple):
    """A message on its way. ``frames`` is what travels, ``size`` their bytes; the rest is for the eye."""

    envelope: Envelope
    target: int
    endpoint: str
    message: Message
    size: int
    frames: tuple[bytearray, ...]

    def copy(self) -> Parcel:
        """The same in other memory."""
        return self._replace(frames=tuple(bytearray(f) for f in self.frames))

    def __str__(self) -> str:
        e = self.envelope
        return f"{e.source} -> {self.target} {MessageType(e.type).name} #{e.message_id} {self.size} B"


class Carrier(Protocol):
    """What a fault needs of the network."""

    changed: threading.Condition

    def begin(self, fault: Fault) -> None:
        """Ask ``fault`` about each parcel from now on."""
        ...

    def end(self, fault: Fault) -> None:
        """Ask it no more."""
        ...

    def deliver(self, parcel: Parcel) -> None:
        """Put ``parcel`` before its mailbox. Called with ``changed`` held."""
        ...


class Fault:
    """One thing that goes wrong, to parcels of some type, from some workers, to some workers.

    ``caught`` lists the parcels it happened to, oldest first.
    """

    def __init__(
        self,
        carrier: Carrier,
        kind: MessageType | None = None,
        times: int | None = None,
        source: Workers = None,
        target: Workers = None,
    ) -> None:
        self._carrier = carrier
        self._kind = kind
        self._left = times
        self._source = _as_set(source)
        self._target = _as_set(target)
        self.caught: list[Parcel] = []

    def pass_on(self, parcel: Parcel) -> list[Parcel]:
        """What goes on now that ``parcel`` was sent. Called by the network, one parcel at a time."""
        if not self._matches(parcel):
            return [parcel]
        if self._left is not None:
            self._left -= 1
        self.caught.append(parcel)
        self._carrier.changed.notify_all()
        return self._happen(parcel)

    def _matches(self, parcel: Parcel) -> bool:
        return (
            self._left != 0
            and self._kind in (None, parcel.envelope.type)
            and (self._source is None or parcel.envelope.source in self._source)
            and (self._target is None or parcel.target in self._target)
        )

    def _happen(self, parcel: Parcel) -> list[Parcel]:
        """A matching parcel was sent: what goes on in its place?"""
        raise NotImplementedError

    def _let_go(self) -> list[Parcel]:
        """The fault ends: what goes on now?"""
        return []

    def choose(self, target: int, waiting: int) -> int:
        """Which of the ``waiting`` parcels before ``target`` (0: the oldest) should it take next?"""
        return 0

    def wait(self, count: int = 1, timeout: float = WAIT_SECONDS) -> None:
        """Wait until it has happened to ``count`` parcels.

        Raises:
            TimeoutError: if it has not within ``timeout`` seconds.
        """
        limit = Deadline.after(timeout)
        with self._carrier.changed:
            if not self._carrier.changed.wait_for(lambda: len(self.caught) >= count, limit.timeout()):
                raise TimeoutError(f"{self!r} within {timeout} s; waited for {count}")

    def __enter__(self: F) -> F:
        self._carrier.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._carrier.changed:
            self._carrier.end(self)
            for parcel in self._let_go():
                self._carrier.deliver(parcel)

    def __repr__(self) -> str:
        what = "any message" if self._kind is None else self._kind.name
        return f"<{type(self).__name__} of {what}: caught {len(self.caught)}>"


class Drop(Fault):
    """The parcel is lost."""

    def _happen(self, parcel: Parcel) -> list[Parcel]:
        return []


class Duplicate(Fault):
    """The parcel arrives twice."""

    def _happen(self, parcel: Parcel) -> list[Parcel]:
        return [parcel, parcel.copy()]


class Hold(Fault):
    """The parcel waits until released; others overtake it."""

    def __init__(
        self,
        carrier: Carrier,
        kind: MessageType | None = None,
        times: int | None = None,
        source: Workers = None,
        target: Workers = None,
    ) -> None:
        super().__init__(carrier, kind, times, source, target)
        self._held: list[Parcel] = []

    def _happen(self, parcel: Parcel) -> list[Parcel]:
        self._held.append(parcel)
        return []

    def _let_go(self) -> list[Parcel]:
        held, self._held = self._held, []
        return held

    def release(self, count: int | None = None) -> None:
        """Let the ``count`` oldest go on (None: all), in the order in which they were sent."""
        with self._carrier.changed:
            going = self._held[:count]
            del self._held[:count]
            for parcel in going:
                self._carrier.deliver(parcel)


class Delay(Hold):
    """The parcel arrives only after ``by`` others, sent later, have gone past it."""

    def __init__(
        self,
        carrier: Carrier,
        kind: MessageType | None = None,
        times: int | None = None,
        source: Workers = None,
        target: Workers = None,
        by: int = 1,
    ) -> None:
        super().__init__(carrier, kind, times, source, target)
        self._by = by
        self._passed: list[int] = []  # for each held parcel, how many have overtaken it

    def pass_on(self, parcel: Parcel) -> list[Parcel]:
        going = super().pass_on(parcel)
        if not going:
            self._passed.append(0)
            return going
        self._passed = [n + 1 for n in self._passed]
        due = sum(n >= self._by for n in self._passed)
        going += self._held[:due]
        del self._held[:due], self._passed[:due]
        return going

    def release(self, count: int | None = None) -> None:
        """Let the ``count`` oldest go on (None: all) at once."""
        with self._carrier.changed:
            del self._passed[:count]
            super().release(count)


class Partition(Fault):
    """Nothing goes between one side and the other, either way."""

    def __init__(self, carrier: Carrier, one: int | Collection[int], other: Workers = None) -> None:
        super().__init__(carrier)
        self._one = _as_set(one) or frozenset()
        self._other = _as_set(other)

    def _matches(self, parcel: Parcel) -> bool:
        way = parcel.envelope.source, parcel.target
        return self._crosses(*way) or self._crosses(*reversed(way))

    def _crosses(self, here: int, there: int) -> bool:
        if self._other is None:
            return here in self._one and there not in self._one
        return here in self._one and there in self._other

    def _happen(self, parcel: Parcel) -> list[Parcel]:
        return []


class Reorder(Fault):
    """What waits before a mailbox at the same time is taken in an order drawn from a seed.

    Nothing is kept waiting for it, so no conversation can stall. ``caught`` stays empty.
    """

    def __init__(self, carrier: Carrier, seed: int, window: int = 8, target: Workers = None) -> None:
        super().__init__(carrier, times=0, target=target)
        self._random = random.Random(seed)
        self._window = window

    def choose(self, target: int, waiting: int) -> int:
        if self._target is not None and target not in self._target:
            return 0
        return self._random.randrange(min(waiting, self._window))


def _as_set(workers: Workers) -> frozenset[int] | None:
    if workers is None:
        return None
    return frozenset((workers,) if isinstance(workers, int) else workers)
