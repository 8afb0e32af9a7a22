"""The tracer of one actor: makes the events of what it does. Runs in the threads of the program."""

from __future__ import annotations

import logging
import reprlib
import sys
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from zmqgrad.errors import TraceError
from zmqgrad.runtime.clock import monotonic_ns as now
from zmqgrad.trace import events, stacks
from zmqgrad.trace.active import Row
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.requests import RemoteRequests
from zmqgrad.transport import tap as tapping
from zmqgrad.transport.tap import Identity, Usage
from zmqgrad.wire.messages import BY_TYPE, ForwardAutogradReq, Message, MessageType

if TYPE_CHECKING:
    from zmqgrad.trace.recorder import Recorder

logger = logging.getLogger(__name__)

SHORT_WAIT_NANOSECONDS = 1_000_000
"""A wait that ends within this time, and has not failed, is not recorded: its messages tell as much."""

LARGE_BYTES = 1 << 16
"""Of messages of this size and more, it is recorded what sending them took."""

MAX_NAMES = 1 << 16
"""Names that a log declares; what comes later has none (the keys of a store may all differ)."""

MAX_NAME_CHARACTERS = 200

_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = 60


def _name_getters() -> dict[int, Callable[[Message], Any]]:
    """How the name of a message is read, by its type: the function of a call, the first key of a query."""
    getters: dict[int, Callable[[Message], Any]] = {}
    for kind, struct in BY_TYPE.items():
        for field in ("function", "key", "keys", "prefix"):
            if field in struct.__struct_fields__:
                getters[kind] = attrgetter(field)
                break
    getters[MessageType.FORWARD_AUTOGRAD_REQ] = _wrapped_function
    return getters


def _wrapped_function(message: Message) -> str:
    assert isinstance(message, ForwardAutogradReq)
    return getattr(message.wrapped, "function", "")


_NAME_OF = _name_getters()
# Plain numbers, looked up once: what is done for each message must take little.
_SENT, _RECEIVED = tag_of(events.MessageSent), tag_of(events.MessageReceived)
_SEND_RECORDED = tag_of(events.SendRecorded)
_REQUEST_FINISHED, _REQUEST_RAN = tag_of(events.RequestFinished), tag_of(events.RequestRan)
_WAIT_ENDED, _WAITED = tag_of(events.WaitEnded), tag_of(events.Waited)
_FORWARD_REPLY = int(MessageType.FORWARD_AUTOGRAD_RESP)
_WITH_SEND = frozenset((MessageType.FORWARD_AUTOGRAD_REQ, MessageType.FORWARD_AUTOGRAD_RESP))
_WITH_CONTEXT = frozenset(k for k, struct in BY_TYPE.items() if "context_id" in struct.__struct_fields__)


class Tracer:
    """Records the events of one actor; :class:`~zmqgrad.transport.tap.Tracer` documents the methods."""

    def __init__(self, recorder: Recorder, actor: int, identity: Identity) -> None:
        self._is_worker = identity.role == tapping.WORKER
        self._requests = RemoteRequests(recorder.directory, identity)
        self.records_arguments = recorder.arguments
        self.records_heartbeats = recorder.heartbeats
        self._recorder = recorder
        self._actor = actor
        self._queue = recorder.queue
        self._names = recorder.names
        self._threads = recorder.threads
        self._active = recorder.active
        self._incarnations: dict[int, int] = {}  # of peers, as declared last
        self._closed = False

    def tap(
        self,
        outgoing: bool,
        peer: int,
        envelope: tuple[int, ...],
        message: Message,
        size: int,
        time: int,
        path: int = tapping.INLINE,
        /,
    ) -> None:
        """A message was sent or received."""
        queue = self._queue
        if len(queue) >= self._recorder.max_events:
            self._recorder.drop()
            return
        kind = envelope[0]
        context = 0
        if not self._is_worker:
            context = envelope[4]
        else:
            if not outgoing and self._incarnations.get(peer) != envelope[2]:
                self._declare_peer(time, peer, envelope[2])
            if kind in _WITH_CONTEXT:
                context = message.context_id  # type: ignore[attr-defined]
        number = 0
        name = _NAME_OF.get(kind)
        if name is not None:
            text = name(message)
            known = self._names.get(text)
            number = self._recorder.declare_name(text) if known is None else known
        thread = self._threads.number or self._recorder.declare_thread()
        row = (time, thread, self._actor, kind, peer, envelope[3], context, number, size, path)
        if not outgoing:
            queue.append((_RECEIVED, *row))
        elif size < LARGE_BYTES:
            queue.append((_SENT, *row))
        else:
            queue.append((_SENT, *row, now() - time))
        if context and outgoing and kind in _WITH_SEND and message.autograd_id:  # type: ignore[attr-defined]
            send = message.autograd_id  # type: ignore[attr-defined]
            is_reply = kind == _FORWARD_REPLY
            queue.append(
                (_SEND_RECORDED, time, thread, self._actor, context, send, peer, envelope[3], is_reply)
            )

    def _declare_peer(self, time: int, peer: int, incarnation: int) -> None:
        if len(self._incarnations) < MAX_NAMES:
            self._incarnations[peer] = incarnation
            self._queue.append((tag_of(events.PeerDeclared), time, self._actor, peer, incarnation))

    def _add(self, kind: type[events.Event], *values: Any, began: int | None = None) -> None:
        thread = self._threads.number or self._recorder.declare_thread()
        self._append((tag_of(kind), now() if began is None else began, thread, self._actor, *values))

    def _append(self, row: Row) -> None:
        if len(self._queue) >= self._recorder.max_events:
            self._recorder.drop()
        else:
            self._queue.append(row)

    def request_started(self, peer: int, message_id: int) -> None:
        thread = self._threads.number or self._recorder.declare_thread()
        self._active.requests[thread, self._actor, peer, message_id] = now()

    def request_finished(self, peer: int, message_id: int, failed: bool) -> None:
        key = (self._threads.number or self._recorder.declare_thread(), self._actor, peer, message_id)
        begun, ended = self._active.requests.pop(key, None), now()
        if begun is None:  # the begin is in the log, or was before the recording
            self._queue.append((_REQUEST_FINISHED, ended, *key, failed))  # never dropped; one for each thread
        else:
            self._append((_REQUEST_RAN, begun, *key, ended - begun, failed))

    def request_described(
        self, message_id: int, function: str, args: Sequence[Any] | None, kwargs: Any
    ) -> None:
        shown = show_arguments(args or (), kwargs or {}) if self.records_arguments else ""
        self._add(events.RequestDescribed, message_id, function[:MAX_NAME_CHARACTERS], shown)

    def serialized(
        self,
        nanoseconds: int,
        peer: int,
        message_id: int,
        is_reply: bool,
        contents: Sequence[tuple[object, int, int, int]],
    ) -> None:
        began = now() - nanoseconds
        numbers = [(self._recorder.number_of(storage), *rest) for storage, *rest in contents]
        self._add(events.Serialized, peer, message_id, nanoseconds, is_reply, numbers, began=began)

    def wait_begun(self, peer: int, message_id: int) -> None:
        thread = self._threads.number or self._recorder.declare_thread()
        self._active.waits[thread, self._actor, peer, message_id] = now()

    def wait_ended(self, peer: int, message_id: int, failed: bool) -> None:
        key = (self._threads.number or self._recorder.declare_thread(), self._actor, peer, message_id)
        begun, ended = self._active.waits.pop(key, None), now()
        if failed:
            self._recorder.wait_failed(ended, key[0], isinstance(sys.exc_info()[1], KeyboardInterrupt))
        if begun is None:  # as above
            self._queue.append((_WAIT_ENDED, ended, *key, failed))
        elif failed or ended - begun >= SHORT_WAIT_NANOSECONDS:
            self._append((_WAITED, begun, *key, ended - begun, failed))

    def group_called(self, began: int, function: str, calls: Sequence[int], failed: bool) -> None:
        name, took = function[:MAX_NAME_CHARACTERS], now() - began
        self._add(events.GroupCalled, took, name, tuple(calls), failed, began=began)

    def context_created(self, context: int) -> None:
        self._add(events.ContextCreated, context)

    def context_released(self, context: int) -> None:
        self._add(events.ContextReleased, context)

    def pass_started(self, context: int, pass_id: int) -> None:
        self._add(events.PassStarted, context, pass_id)

    def pass_finished(self, context: int, pass_id: int, failed: bool) -> None:
        self._add(events.PassFinished, context, pass_id, failed)

    def group_executed(
        self,
        began: int,
        context: int,
        pass_id: int,
        sends: Sequence[int],
        recvs: Sequence[tuple[int, int]],
        missing: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> None:
        took = now() - began
        self._add(events.GroupExecuted, context, pass_id, took, sends, recvs, missing, began=began)

    def step_taken(self, context: int, staleness: int, applied: bool) -> None:
        self._add(events.StepTaken, context, staleness, applied)

    def published(self, began: int, name: str, version: int, size: int) -> None:
        self._add(events.Published, now() - began, name, version, size, began=began)

    def rendezvous_step(self, round_number: int, action: str, participants: int, waiting: int) -> None:
        self._add(events.RendezvousStep, round_number, action, participants, waiting)

    def heartbeat(self, peer: int, outgoing: bool) -> None:
        self._add(events.Heartbeat, peer, outgoing)

    def watch_usage(self, measure: Callable[[], Usage]) -> None:
        self._recorder.measures[self._actor] = weakref.WeakMethod(measure)

    def peer_lost(self, peer: int, reason: str, left: bool = False) -> None:
        self._add(events.PeerLost, peer, reason[:MAX_NAME_CHARACTERS])

    def call_failed(self, peer: int, message_id: int, error: str) -> None:
        self._add(events.CallFailed, peer, message_id, error)

    def request_stacks(self) -> None:
        try:
            stacks.request_stacks(self._recorder.directory)
        except TraceError as e:
            logger.debug("%s", e)

    def locate(self, peer: int, message_id: int, context: int = 0) -> str:
        return self._requests.locate(peer, self._incarnations.get(peer, 0), message_id, context)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._recorder.detach(self._actor)


def show_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The arguments of a call as text of bounded length; an argument that cannot be shown does not matter."""
    shown = [_show(each) for each in args[:8]] + [f"{k}={_show(v)}" for k, v in list(kwargs.items())[:8]]
    return ", ".join(shown)[: 2 * MAX_NAME_CHARACTERS]


def _show(value: object) -> str:
    try:
        return _repr.repr(value)
    except Exception as e:  # the user's __repr__ must not fail a call because it is traced
        return f"<{type(value).__name__}: {type(e).__name__} in __repr__>"
