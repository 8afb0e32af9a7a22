"""Assembles calls: requests with their replies, and what happened to them at the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zmqgrad.trace.events import (
    MessageReceived,
    MessageSent,
    RequestDescribed,
    RequestFinished,
    RequestStarted,
)
from zmqgrad.trace.model import Call, Declared, Message, Stamped
from zmqgrad.trace.pairing import REPEATED, Key, Open, Pairing
from zmqgrad.wire.messages import REQUEST, RESPONSE


class Assembly:
    """Assembles the calls of a stream of events."""

    def __init__(self, stamped: Iterator[tuple[Stamped, Declared]]) -> None:
        self._stamped = stamped
        self._pairing = Pairing(stamped)
        self._open: Open[Call] = Open()
        # What was read before the request to which it belongs: clocks are aligned to within an error only.
        self._replies: Open[Message] = Open()
        self._early: Open[list[Stamped]] = Open()

    def run(self) -> Iterator[Call]:
        """Yields the calls."""
        for stamped, declared in self._stamped:
            event, actor = stamped.event, stamped.actor
            kind = type(event)
            if kind is MessageSent or kind is MessageReceived:
                for message in self._pairing.add(stamped, declared):
                    yield from self._add(message)
            elif actor is None:
                continue
            elif isinstance(event, (RequestStarted, RequestFinished)):
                source = declared.incarnations.get((event.actor, event.peer), 0)
                yield from self._happened((source, event.message_id), stamped)
            elif isinstance(event, RequestDescribed):
                yield from self._happened((actor.incarnation, event.message_id), stamped)
        for message in self._pairing.rest():
            yield from self._add(message)
        yield from self._open.items.values()

    def _happened(self, key: Key, stamped: Stamped) -> Sequence[Call]:
        call = self._open.items.get(key)
        if call is None:
            self._early.items.setdefault(key, []).append(stamped)
            self._early.evict()
            return ()
        _apply(call, stamped)
        return self._complete(key, call)

    def _add(self, message: Message) -> Sequence[Call]:
        if not message.message_id or message.kind in REPEATED:
            return ()
        if message.kind & REQUEST:
            key = (message.requester, message.message_id)
            call = self._open.items[key] = Call(message, self._replies.items.pop(key, None))
            call.function = message.name
            for stamped in self._early.items.pop(key, ()):
                _apply(call, stamped)
            return [*self._complete(key, call), *self._open.evict()]
        if message.kind & RESPONSE:
            key = (message.requester, message.message_id)
            call_open = self._open.items.get(key)
            if call_open is not None:
                call_open.reply = message
                return self._complete(key, call_open)
            self._replies.items[key] = message
            self._replies.evict()
        return ()

    def _complete(self, key: Key, call: Call) -> Sequence[Call]:
        """Returns ``call`` if nothing more is to come: most have finished when the reply arrives."""
        if not call.is_complete or (call.started is not None and call.finished is None):
            return ()
        self._open.items.pop(key, None)
        return (call,)


def _apply(call: Call, stamped: Stamped) -> None:
    """Notes what happened to the request of ``call`` at the server. Its times never decrease."""
    event = stamped.event
    if isinstance(event, RequestStarted):
        call.started, call.thread = max(stamped.time, call.request.received or stamped.time), event.thread
    elif isinstance(event, RequestFinished):
        call.finished, call.failed = max(stamped.time, call.started or stamped.time), event.failed
    elif isinstance(event, RequestDescribed):
        call.function, call.arguments = event.function or call.function, event.arguments
