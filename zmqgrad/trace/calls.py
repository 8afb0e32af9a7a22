"""Assembles calls: requests with their replies, and what happened to them at the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from zmqgrad.trace.events import (
    CallFailed,
    MessageEvent,
    PeerDeclared,
    RequestDescribed,
    RequestFinished,
    RequestStarted,
    Serialized,
)
from zmqgrad.trace.kinds import REPEATED
from zmqgrad.trace.labels import tidy
from zmqgrad.trace.model import Call, Entry, Message
from zmqgrad.trace.pairing import Key, Open, Pairing
from zmqgrad.wire.messages import REQUEST, RESPONSE


class Assembly:
    """Assembles the calls of a stream of events."""

    def __init__(self) -> None:
        self._pairing = Pairing()
        self._open: Open[Call] = Open()
        # What was read before the request to which it belongs: clocks are aligned to within an error only.
        self._replies: Open[Message] = Open()
        self._early: Open[list[Entry]] = Open()

    def run(self, entries: Iterable[Entry]) -> Iterator[Call]:
        """Yields the calls of ``entries``."""
        add = self.add
        for entry in entries:
            yield from add(entry)
        for message in self._pairing.rest():
            yield from self._add(message)
        yield from self._open.values()

    def add(self, entry: Entry) -> Sequence[Call]:
        """Adds an event. Returns the calls that this completes, or that make room."""
        _, declared, actor, event = entry
        if isinstance(event, (MessageEvent, PeerDeclared)):
            return [call for message in self._pairing.add(entry) for call in self._add(message)]
        if actor is None:
            return ()
        if isinstance(event, (RequestStarted, RequestFinished)):
            source = declared.incarnations.get((event.actor, event.peer), 0)
            return self._happened((source, event.message_id), entry)
        if isinstance(event, Serialized):
            source = declared.incarnations.get((event.actor, event.peer), 0) if event.is_reply else 0
            return self._happened((source or actor.incarnation, event.message_id), entry)
        if isinstance(event, (RequestDescribed, CallFailed)):
            return self._happened((actor.incarnation, event.message_id), entry)
        return ()

    def _happened(self, key: Key, entry: Entry) -> Sequence[Call]:
        call = self._open.get(key)
        if call is None:
            self._early.setdefault(key, []).append(entry)
            self._early.evict()
            return ()
        _apply(call, entry)
        return self._complete(key, call)

    def _add(self, message: Message) -> Sequence[Call]:
        if not message.message_id or message.kind in REPEATED:
            return ()
        if message.kind & REQUEST:
            key = message.key
            call = self._open[key] = Call(message, self._replies.pop(key, None))
            call.function = message.name
            for entry in self._early.pop(key, ()):
                _apply(call, entry)
            return [*self._complete(key, call), *self._open.evict()]
        if message.kind & RESPONSE:
            key = message.key
            call_open = self._open.get(key)
            if call_open is not None:
                call_open.reply = message
                return self._complete(key, call_open)
            self._replies[key] = message
            self._replies.evict()
        return ()

    def _complete(self, key: Key, call: Call) -> Sequence[Call]:
        """Returns ``call`` if nothing more is to come: most have finished when the reply arrives."""
        if not call.is_complete or (call.started is not None and call.finished is None):
            return ()
        self._open.pop(key, None)
        return (call,)


def _apply(call: Call, entry: Entry) -> None:
    """Notes what happened to the request of ``call``. Its times at the server never decrease."""
    time, _, _, event = entry
    if isinstance(event, RequestStarted):
        call.started, call.thread = max(time, call.request.received or time), event.thread
    elif isinstance(event, RequestFinished):
        call.finished, call.failed = max(time, call.started or time), event.failed
    elif isinstance(event, Serialized):
        call.serializing += event.nanoseconds
        call.contents += [(event.is_reply, each) for each in event.contents]
    elif isinstance(event, RequestDescribed):
        call.function, call.arguments = call.function or tidy(event.function), event.arguments
    elif isinstance(event, CallFailed):
        call.given_up, call.error = time, event.error
