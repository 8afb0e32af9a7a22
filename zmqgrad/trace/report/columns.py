"""The messages of a job as columns of numbers, in order of time: small enough for a page with a million."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from zmqgrad.trace.kinds import REPEATED
from zmqgrad.trace.model import Actor, Message
from zmqgrad.wire.messages import REQUEST, RESPONSE

HAS_SENT, HAS_RECEIVED, IS_REQUEST, IS_REPLY, HAS_FAILED = 1, 2, 4, 8, 16
"""Bits of the column ``flags``; those above ``PATH_SHIFT`` are the path."""
PATH_SHIFT = 6

NO_ROW = -1
NO_TIME = -(1 << 62)
MAX_UINT32 = (1 << 32) - 1

Key = tuple[int, int]
"""The requester and the message id, by which a request and its reply belong together."""


class Numbering:
    """Numbers values in the order of their appearance; 0 is the value given here."""

    def __init__(self, first: Any) -> None:
        self._numbers: dict[Any, int] = {first: 0}

    def __getitem__(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[Any]:
        """All values; each at its number."""
        return list(self._numbers)


class Actors:
    """The actors of a job by number."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.all = list(actors)
        self._numbers = {id(actor): i for i, actor in enumerate(self.all)}

    def number(self, actor: Actor | None) -> int:
        """The number of ``actor``; -1: unknown."""
        return self._numbers.get(id(actor), NO_ROW) if actor is not None else NO_ROW


class Messages:
    """The messages of a job; each attribute but the last three is a column.

    Args:
        actors: of the job.
        messages: in any order.
    """

    def __init__(self, actors: Actors, messages: Iterable[Message]) -> None:
        self.time = array("q")
        """When it was sent, or when it was received if that is not known (ns of the job's clock)."""
        self.end = array("q")
        """When it was received, or the same as ``time``."""
        self.flags = array("B")
        self.kind = array("H")
        self.source, self.target = array("i"), array("i")
        self.sender_thread, self.receiver_thread = array("I"), array("I")
        self.name = array("I")
        self.size = array("I")
        self.number = array("Q")
        """The message id."""
        self.context = array("I")
        self.requester = array("Q")
        self.names = Numbering("")
        self.contexts = Numbering(0)
        self.threads = Numbering("")
        for message in messages:
            self._add(actors, message)
        self._sort()
        count = len(self.time)
        self.started, self.finished = array("q", [NO_TIME]) * count, array("q", [NO_TIME]) * count
        """When a thread took the request, and when it was done with it; ``NO_TIME``: unknown."""
        self.arguments: dict[int, str] = {}
        self.requests: dict[Key, int] = {}
        self.pair = array("i", [NO_ROW]) * count
        """The row of the reply to a request, or of the request of a reply."""
        self._find_pairs()

    def __len__(self) -> int:
        return len(self.time)

    def _add(self, actors: Actors, m: Message) -> None:
        has = (HAS_SENT if m.sent is not None else 0) | (HAS_RECEIVED if m.received is not None else 0)
        unique = m.message_id and m.kind not in REPEATED
        role = (IS_REQUEST if m.kind & REQUEST else IS_REPLY if m.kind & RESPONSE else 0) if unique else 0
        self.time.append(m.time)
        self.end.append(m.received if m.received is not None else m.time)
        self.flags.append(has | role | m.path << PATH_SHIFT)
        self.kind.append(m.kind)
        self.source.append(actors.number(m.source))
        self.target.append(actors.number(m.target))
        self.sender_thread.append(self.thread(m.source, m.sender_thread))
        self.receiver_thread.append(self.thread(m.target, m.receiver_thread))
        self.name.append(self.names[m.name])
        self.size.append(min(m.size, MAX_UINT32))
        self.number.append(m.message_id)
        self.context.append(self.contexts[m.context])
        self.requester.append(m.requester)

    def thread(self, actor: Actor | None, number: int) -> int:
        """The number of the name of a thread."""
        declared = actor.process.threads.get(number) if actor is not None else None
        return self.threads[declared.name if declared else ""]

    def _sort(self) -> None:
        order = sorted(range(len(self.time)), key=self.time.__getitem__)
        for name, column in list(vars(self).items()):
            if isinstance(column, array):
                setattr(self, name, array(column.typecode, map(column.__getitem__, order)))

    def _find_pairs(self) -> None:
        replies: dict[Key, int] = {}
        for row, (flags, requester, number) in enumerate(
            zip(self.flags, self.requester, self.number, strict=True)
        ):
            if flags & IS_REQUEST:
                self.requests[requester, number] = row
            elif flags & IS_REPLY:
                replies[requester, number] = row
        for key, reply in replies.items():
            request = self.requests.get(key, NO_ROW)
            if request != NO_ROW:
                self.pair[request], self.pair[reply] = reply, request
                if not self.name[reply]:
                    self.name[reply] = self.name[request]


def little_endian(column: array[int]) -> bytes:
    """The bytes of a column as a page reads it, padded so that the next one is aligned."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    data = column.tobytes()
    return data + b"\0" * (-len(data) % 8)
