"""What the processes of a job did besides sending messages: requests served, waits, autograd contexts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from zmqgrad.trace.events import (
    Event,
    GroupExecuted,
    PassFinished,
    PassStarted,
    PeerDeclared,
    RequestDescribed,
    RequestFinished,
    RequestStarted,
    SendRecorded,
    WaitBegun,
    WaitEnded,
)
from zmqgrad.trace.model import Actor, Stamped
from zmqgrad.trace.report.columns import HAS_FAILED, NO_ROW, Actors, Messages, tidy

ENDED, FAILED, OPEN = 0, 1, 2
"""How a wait ended: with a reply, without, or not as far as the trace shows."""

_T = TypeVar("_T")


class Wait(msgspec.Struct, gc=False):
    """A thread of ``actor`` waited for worker ``peer``; ``row`` is the request, -1 for a backward pass."""

    actor: int
    peer: int
    thread: str
    begun: int
    ended: int
    state: int
    row: int


class Group(msgspec.Struct, gc=False):
    """Groups of a backward pass that an actor ran."""

    actor: int
    began: int
    nanoseconds: int
    pass_id: int
    sends: tuple[int, ...]
    recvs: tuple[tuple[int, int], ...]


class Send(msgspec.Struct, gc=False):
    """Tensors that ``actor`` sent to ``peer`` in the message ``row``, and expects gradients for."""

    autograd_id: int
    actor: int
    peer: int
    row: int
    time: int


class Pass(msgspec.Struct, gc=False):
    """A backward pass; ``ended`` is None if it has not."""

    actor: int
    pass_id: int
    began: int
    ended: int | None = None
    failed: bool = False


class Context(msgspec.Struct):
    """A distributed autograd context: what was sent in it, and its backward passes."""

    number: int
    sends: dict[int, Send] = {}
    groups: list[Group] = []
    passes: list[Pass] = []

    def unused(self) -> list[Send]:
        """The sends that got no gradient, if a pass has finished."""
        if not any(p.ended is not None and not p.failed for p in self.passes):
            return []
        used = {send for group in self.groups for send in group.sends}
        return [send for number, send in self.sends.items() if number not in used]


class Activity:
    """What happened besides messages; notes at the requests of ``messages`` when they were served."""

    def __init__(self, actors: Actors, messages: Messages, events: Iterable[Stamped]) -> None:
        self.waits: list[Wait] = []
        self.contexts: dict[int, Context] = {}
        self._actors, self._messages = actors, messages
        self._incarnations: dict[tuple[int, int], int] = {}
        self._open: dict[tuple[int, int, int, int], Wait] = {}
        self._last = 0
        for time, _, actor, event in events:
            self._last = max(self._last, time)
            if actor is not None:
                self._add(time, actor, event)
        for wait in self._open.values():
            wait.ended = self._last
            self.waits.append(wait)
        self.waits.sort(key=lambda w: w.begun)
        if not any(actor.process.dropped for actor in actors.all):
            self._mark_failed()

    def _mark_failed(self) -> None:
        """A wait that ended before the reply arrived has failed, whatever ended it (a timeout, a loss)."""
        messages = self._messages
        for wait in self.waits:
            if wait.state == ENDED and wait.row != NO_ROW:
                reply = messages.pair[wait.row]
                if reply == NO_ROW or messages.end[reply] > wait.ended:
                    wait.state = FAILED

    def _add(self, time: int, actor: Actor, event: Event) -> None:
        if isinstance(event, (RequestStarted, RequestFinished)):
            source = self._incarnations.get((id(actor), event.peer), 0)
            self._served(time, source, event)
        elif isinstance(event, PeerDeclared):
            self._incarnations[id(actor), event.peer] = event.incarnation
        elif isinstance(event, RequestDescribed):
            self._describe(actor, event)
        elif isinstance(event, (WaitBegun, WaitEnded)):
            self._wait(time, actor, event)
        elif isinstance(event, (SendRecorded, GroupExecuted, PassStarted, PassFinished)):
            self._autograd(time, actor, event)

    def _served(self, time: int, source: int, event: RequestStarted | RequestFinished) -> None:
        messages = self._messages
        row = messages.requests.get((source, event.message_id), NO_ROW)
        if row == NO_ROW:
            return
        if isinstance(event, RequestStarted):
            messages.started[row] = max(time, messages.end[row])
            messages.receiver_thread[row] = self._thread_number(event.thread, row)
        else:
            messages.finished[row] = max(time, messages.started[row])
            messages.flags[row] |= HAS_FAILED if event.failed else 0

    def _thread_number(self, thread: int, row: int) -> int:
        """The thread that serves the request; the one that received it only passes it on."""
        actor = self._actors.all[self._messages.target[row]]
        declared = actor.process.threads.get(thread)
        return self._messages.threads[declared.name if declared else ""] & 0xFFFF

    def _describe(self, actor: Actor, event: RequestDescribed) -> None:
        messages = self._messages
        row = messages.requests.get((actor.incarnation, event.message_id), NO_ROW)
        if row == NO_ROW:
            return
        if event.function:
            for each in (row, messages.pair[row]):
                if each != NO_ROW and not messages.name[each]:
                    messages.name[each] = messages.names[tidy(event.function)]
        if event.arguments:
            messages.arguments[row] = event.arguments

    def _wait(self, time: int, actor: Actor, event: WaitBegun | WaitEnded) -> None:
        key = (id(actor), event.thread, event.peer, event.message_id)
        if isinstance(event, WaitEnded):
            wait = self._open.pop(key, None)
            if wait is not None:
                wait.ended, wait.state = time, FAILED if event.failed else ENDED
                self.waits.append(wait)
            return
        declared = actor.process.threads.get(event.thread)
        row = self._messages.requests.get((actor.incarnation, event.message_id), NO_ROW)
        own = self._actors.number(actor)
        peer = self._actors.worker(event.peer)
        self._open[key] = Wait(own, peer, declared.name if declared else "", time, time, OPEN, row)

    def _autograd(
        self, time: int, actor: Actor, event: SendRecorded | GroupExecuted | PassStarted | PassFinished
    ) -> None:
        context = self.contexts.setdefault(event.context, Context(event.context))
        own = self._actors.number(actor)
        if isinstance(event, SendRecorded):
            source = actor.incarnation
            if event.is_reply:
                source = self._incarnations.get((id(actor), event.peer), 0)
            row = self._messages.requests.get((source, event.message_id), NO_ROW)
            if event.is_reply and row != NO_ROW:
                row = self._messages.pair[row]
            peer = self._actors.worker(event.peer)
            context.sends[event.autograd_id] = Send(event.autograd_id, own, peer, row, time)
        elif isinstance(event, GroupExecuted):
            recvs = tuple((recv, self._actors.worker(peer)) for recv, peer in event.recvs)
            context.groups.append(Group(own, time, event.nanoseconds, event.pass_id, event.sends, recvs))
        elif isinstance(event, PassStarted):
            context.passes.append(Pass(own, event.pass_id, time))
        else:
            for each in context.passes:
                if each.pass_id == event.pass_id:
                    each.ended, each.failed = time, event.failed
