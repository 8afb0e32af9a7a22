"""Pairs the two ends of each message, in a stream of events of all processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from zmqgrad.trace.events import MessageEvent, MessageReceived, MessageSent, PeerDeclared, Role
from zmqgrad.trace.kinds import REPEATED
from zmqgrad.trace.model import Actor, Declared, Entry, Message
from zmqgrad.wire.messages import REQUEST, RESPONSE

MAX_OPEN = 1 << 18
"""Incomplete messages or calls kept while reading; beyond, the oldest are yielded as they are."""

_PAIRED = frozenset((MessageSent, MessageReceived, PeerDeclared))

Key = tuple[int, ...]
_T = TypeVar("_T")


class Open(dict[Key, _T]):
    """Incomplete things by key, at most ``MAX_OPEN``; the oldest make room."""

    def evict(self) -> list[_T]:
        """Removes the older half if there are too many."""
        if len(self) <= MAX_OPEN:
            return []
        keys = list(itertools.islice(self, MAX_OPEN // 2))
        return [self.pop(key) for key in keys]


class Pairing:
    """Pairs the two ends of each message of a stream.

    Args:
        aligned: whether times are of one clock, so that no message may arrive before it left.
    """

    def __init__(self, aligned: bool = True) -> None:
        self._aligned = aligned
        self._sent: Open[Message] = Open()
        self._received: Open[Message] = Open()
        self._published: dict[Key, Message] = {}
        self._routes: dict[tuple[int, int], int] = {}  # channel by connection of a server
        self._counts: dict[Key, int] = {}
        self._repeats: Open[int] = Open()  # the same of passes, of which the last ones count
        self._name_keys: dict[str, int] = {}

    def run(self, entries: Iterable[Entry]) -> Iterator[Message]:
        """Yields the messages of ``entries``; those of which only one end was recorded come last."""
        yield from self.feed(entries)
        yield from self.rest()

    def feed(self, entries: Iterable[Entry]) -> Iterator[Message]:
        """Yields the messages that ``entries`` complete, or that make room."""
        for entry in entries:
            if type(entry[3]) in _PAIRED:  # quicker than to call for all
                yield from self.add(entry)

    def add(self, entry: Entry) -> Sequence[Message]:
        """Adds an event. Returns the messages that this completes, or that make room."""
        time, names, actor, event = entry
        if not isinstance(event, MessageEvent):
            if isinstance(event, PeerDeclared):  # by which the messages from this peer are paired
                names.incarnations[event.actor, event.peer] = event.incarnation
            return ()
        if actor is None:
            return ()  # its declaration was dropped
        outgoing = type(event) is MessageSent
        if 0x60 <= event.kind < 0x70:
            return self._notification(time, actor, event, outgoing, names)
        key = self._key(actor, event, outgoing, names)
        ours, theirs = (self._sent, self._received) if outgoing else (self._received, self._sent)
        message = theirs.pop(key, None)
        if message is not None:
            self._complete(message, time, actor, event, outgoing, names)
            return (message,)
        message = ours[key] = _end_of(time, actor, event, names)
        if event.kind & REQUEST or actor.role is not Role.WORKER:
            message.requester = key[0]
        elif event.kind & RESPONSE:
            message.requester = (
                names.incarnations.get((event.actor, event.peer), 0) if outgoing else actor.incarnation
            )
        return ours.evict()

    def _key(self, actor: Actor, event: MessageEvent, outgoing: bool, names: Declared) -> Key:
        """Equal for both ends of a message, and for no other."""
        if actor.role is not Role.WORKER:
            channel = event.peer
            if actor.role is Role.STORE_SERVER:
                route = (id(actor), event.context)
                if outgoing:
                    channel = self._routes.get(route, 0)
                else:
                    self._routes[route] = channel
            return (channel, event.message_id, event.kind)
        if outgoing:
            key: Key = (actor.incarnation, event.peer, event.message_id, event.kind)
        else:
            source = names.incarnations.get((event.actor, event.peer), 0)
            key = (source, actor.rank, event.message_id, event.kind)
        if event.message_id and event.kind not in REPEATED:
            return key
        counter, counts = (*key, outgoing), self._repeats if event.message_id else self._counts
        count = counts[counter] = counts.get(counter, 0) + 1
        self._repeats.evict()
        return (*key, count)

    def _notification(
        self, time: int, actor: Actor, event: MessageEvent, outgoing: bool, names: Declared
    ) -> Sequence[Message]:
        """One publication has many receivers: each gives a message."""
        name = names.names.get(event.name, "")
        key = (event.kind, event.message_id, self._name_keys.setdefault(name, len(self._name_keys)))
        message = _end_of(time, actor, event, names)
        if outgoing:
            self._published[key] = message
            if len(self._published) > MAX_OPEN:
                del self._published[next(iter(self._published))]
            return ()
        sent = self._published.get(key)
        if sent is None:
            return (message,)
        both = msgspec.structs.replace(sent)
        self._complete(both, time, actor, event, outgoing, names)
        return (both,)

    def _complete(
        self, message: Message, time: int, actor: Actor, event: MessageEvent, outgoing: bool, names: Declared
    ) -> None:
        """Adds the second end to ``message``."""
        if outgoing:
            message.source, message.sent, message.sender_thread = actor, time, event.thread
            message.peer, message.path = event.peer, event.path
            assert isinstance(event, MessageSent)
            message.sending = event.nanoseconds
        else:
            message.target, message.received, message.receiver_thread = actor, time, event.thread
        message.size = message.size or event.size
        message.name = message.name or names.names.get(event.name, "")
        if not message.requester and event.kind & RESPONSE and not outgoing:
            message.requester = actor.incarnation
        assert message.sent is not None
        assert message.received is not None
        if self._aligned and message.received < message.sent:
            message.received = message.sent  # within the error of the clocks

    def overdue(self, before: int) -> list[Message]:
        """Gives up on messages of which one end was recorded before this time, and returns them."""
        found = []
        for ends in (self._sent, self._received):
            # They are nearly in order, so the first that is recent ends the search.
            keys = itertools.takewhile(lambda key: ends[key].time < before, ends)  # noqa: B023
            found += [ends.pop(key) for key in list(keys)]
        return found

    def rest(self) -> Iterator[Message]:
        """Yields the messages of which only one end was recorded."""
        yield from self._sent.values()
        yield from self._received.values()


def _end_of(time: int, actor: Actor, event: MessageEvent, names: Declared) -> Message:
    name = names.names.get(event.name, "") if event.name else ""
    context = event.context if actor.role is Role.WORKER else 0
    common = (context, name, event.size, event.path, event.peer)
    if isinstance(event, MessageSent):
        sent = (actor, None, time, None, event.thread, 0)
        return Message(event.kind, event.message_id, *sent, *common, event.nanoseconds)
    return Message(event.kind, event.message_id, None, actor, None, time, 0, event.thread, *common)
