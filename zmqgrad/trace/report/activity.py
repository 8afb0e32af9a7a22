"""What the processes of a job did besides sending messages: requests served, waits, autograd contexts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

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
    StackDumped,
    WaitBegun,
    WaitEnded,
)
from zmqgrad.trace.labels import tidy
from zmqgrad.trace.model import Actor, Process, Stamped
from zmqgrad.trace.places import thread_label
from zmqgrad.trace.report.columns import HAS_FAILED, NO_ROW, Actors, Messages
from zmqgrad.trace.waits import Wait as FullWait
from zmqgrad.trace.waits import WaitPairs

ENDED, FAILED, OPEN = 0, 1, 2
"""How a wait ended: with a reply, without, or not as far as the trace shows."""

MAX_STACKS = 2_000
"""How many recorded stacks are kept: the latest."""


class Wait(msgspec.Struct, gc=False):
    """A thread of ``actor`` waited for worker ``peer``; ``row`` is the request, -1 for a backward pass.

    A row of the page: smaller than a :class:`zmqgrad.trace.waits.Wait`, of which few are kept.
    """

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
        """The sends that got no gradient, if a pass has ended."""
        if not any(p.ended is not None for p in self.passes):
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
        self.stacks: deque[tuple[int, Process, StackDumped]] = deque(maxlen=MAX_STACKS)
        self._pairs = WaitPairs()
        last = 0
        for time, process, actor, event in events:
            last = max(last, time)
            if actor is not None:
                self._add(time, actor, event)
            elif isinstance(event, StackDumped):
                self.stacks.append((time, process, event))
        for wait in self._pairs.rest():
            self._add_wait(wait, last)
        self.waits.sort(key=lambda w: w.begun)

    def _add(self, time: int, actor: Actor, event: Event) -> None:
        if isinstance(event, (RequestStarted, RequestFinished)):
            source = self._incarnations.get((id(actor), event.peer), 0)
            self._served(time, source, event)
        elif isinstance(event, PeerDeclared):
            self._incarnations[id(actor), event.peer] = event.incarnation
        elif isinstance(event, RequestDescribed):
            self._describe(actor, event)
        elif isinstance(event, (WaitBegun, WaitEnded)):
            wait = self._pairs.add(time, actor, event)
            if wait is not None:
                self._add_wait(wait, time)
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

    def _add_wait(self, wait: FullWait, until: int) -> None:
        row = self._messages.requests.get((wait.waiter.incarnation, wait.message_id), NO_ROW)
        own, peer = self._actors.number(wait.waiter), self._actors.worker(wait.rank)
        state = OPEN if wait.until is None else FAILED if wait.failed else ENDED
        self.waits.append(Wait(own, peer, thread_label(wait), wait.since, until, state, row))

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
