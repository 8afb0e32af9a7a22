"""Messages as they are recorded, filtered; replies know the function and context of their request. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import msgspec

from zmqgrad.trace.kinds import REPEATED, is_store
from zmqgrad.trace.labels import ends
from zmqgrad.trace.model import Entry, Message
from zmqgrad.trace.pairing import Open, Pairing
from zmqgrad.wire.messages import REQUEST, RESPONSE, MessageType

OVERDUE_NANOSECONDS = 1_000_000_000
"""A message is shown after this time even if its other end has not been recorded."""


class Line(msgspec.Struct):
    """A message, and for a reply ``latency``: nanoseconds since its request was sent."""

    message: Message
    latency: int | None = None


class Filter(msgspec.Struct, frozen=True):
    """Which messages are shown. Names are patterns as those of a shell; an empty list allows all.

    Functions and types without wildcards match what contains them, but a type's full name only that type.

    A message matches if it has one of ``types``, none of ``without``, one of ``functions`` and ``contexts``,
    one of its ends is in ``workers``, and the other one in ``peers``. Messages of stores need ``stores`` or
    ``types``.
    """

    types: Sequence[str] = ()
    without: Sequence[str] = ()
    functions: Sequence[str] = ()
    contexts: Sequence[int] = ()
    workers: Sequence[str] = ()
    peers: Sequence[str] = ()
    stores: bool = False

    def matches(self, message: Message) -> bool:
        """Whether ``message`` is shown."""
        if self.contexts and message.context not in self.contexts:
            return False
        if is_store(message.kind) and not (self.stores or self.types):
            return False
        kind = message.type
        return (
            _contains(kind, self.types)
            and not (self.without and _contains(kind, self.without))
            and _contains(message.name, self.functions)
            and self._concerns(*ends(message))
        )

    def _concerns(self, source: str, target: str) -> bool:
        return any(
            _matches(one, self.workers) and _matches(other, self.peers)
            for one, other in ((source, target), (target, source))
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _contains(name: str, patterns: Sequence[str]) -> bool:
    """As :func:`_matches`; a pattern without wildcards is looked for in the name."""
    return _matches(name, [each if _is_whole(each) else f"*{each}*" for each in patterns])


def _is_whole(pattern: str) -> bool:
    return pattern in MessageType.__members__ or any(each in pattern for each in "*?[")


class Replies:
    """Adds to replies what only their requests tell."""

    def __init__(self) -> None:
        self._requests: Open[Message] = Open()

    def line(self, message: Message) -> Line:
        """The line of ``message``; requests must come before their replies."""
        if not message.message_id or message.kind in REPEATED:
            return Line(message)
        if message.kind & REQUEST:
            self._requests[message.key] = message
            self._requests.evict()
        elif message.kind & RESPONSE:
            request = self._requests.pop(message.key, None)
            if request is not None:
                message.name = message.name or request.name
                message.context = message.context or request.context
                if message.received is not None and request.sent is not None:
                    return Line(message, message.received - request.sent)
        return Line(message)


class LiveMessages:
    """Pairs messages while they are recorded."""

    def __init__(self) -> None:
        self._pairing = Pairing()
        self._replies = Replies()
        self._newest = 0

    def add(self, entries: Sequence[Entry], waited: int = 0) -> list[Line]:
        """Adds events, in order of time. Returns the messages that are complete or overdue, in that order.

        Args:
            waited: nanoseconds since the last event.
        """
        self._newest = max(self._newest, entries[-1][0] if entries else 0)
        found = list(self._pairing.feed(entries))
        found += self._pairing.overdue(self._newest + waited - OVERDUE_NANOSECONDS)
        return self._lines(found)

    def rest(self) -> list[Line]:
        """The messages whose other end was never recorded."""
        return self._lines(self._pairing.rest())

    def _lines(self, messages: Iterable[Message]) -> list[Line]:
        return sorted(
            map(self._replies.line, sorted(messages, key=_order)), key=lambda line: line.message.time
        )


def recorded(messages: Iterable[Message]) -> Iterator[Line]:
    """The lines of messages that are recorded already, in order of time.

    A thread may record late what it has sent, so messages are not quite complete in that order.
    """
    replies, waiting, newest = Replies(), list[tuple[int, int, Line]](), -math.inf
    for number, message in enumerate(messages):
        heapq.heappush(waiting, (message.time, number, replies.line(message)))
        newest = max(newest, message.time)  # negative before the reference was booted
        while waiting[0][0] < newest - OVERDUE_NANOSECONDS:
            yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


def _order(message: Message) -> int:
    return message.received or message.sent or 0
