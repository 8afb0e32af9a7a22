"""The distributed autograd contexts of a job: what was sent in them, and their backward passes. Pure.

Workers recorded sends in the forward pass; in a backward pass, groups of nodes run when the gradients of
their sends arrive, and send gradients on to the sends of others (their recvs).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from zmqgrad.trace.events import ContextCreated, GroupExecuted, PassFinished, PassStarted, SendRecorded
from zmqgrad.trace.model import Actor, Stamped


class Send(msgspec.Struct):
    """Tensors that ``actor`` sent to worker ``peer`` in the request ``message_id`` or the reply to it."""

    id: int
    actor: Actor
    peer: int
    message_id: int
    is_reply: bool
    time: int


class Group(msgspec.Struct):
    """Groups of nodes that ``actor`` ran at once; ``recvs`` are the sends that its gradients went to."""

    actor: Actor
    pass_id: int
    began: int
    nanoseconds: int
    sends: tuple[int, ...]
    recvs: tuple[int, ...]


class Pass(msgspec.Struct):
    """A backward pass that ``actor`` began; None: its log is missing. ``ended`` None: it has not ended."""

    id: int
    began: int
    actor: Actor | None = None
    ended: int | None = None
    failed: bool = False


class Context(msgspec.Struct):
    """One context; what is in it in the order of recording. Each group of workers has its own numbers."""

    job: str
    number: int
    workers: dict[int, str] = {}
    """The names of those that take part, by their ranks."""
    sends: dict[int, Send] = {}
    groups: list[Group] = []
    passes: dict[int, Pass] = {}

    def unused(self) -> list[Send]:
        """The sends that no pass has reached, if one has ended; in fast mode, it fails because of them."""
        if not any(each.ended is not None for each in self.passes.values()):
            return []
        used = {send for group in self.groups for send in (*group.sends, *group.recvs)}
        return [send for number, send in self.sends.items() if number not in used]


class Contexts:
    """Collects the contexts from the events of a job: ``all``, by group, in the order of first events."""

    def __init__(self, events: Iterable[Stamped] = ()) -> None:
        self.all: dict[tuple[str, int], Context] = {}
        for stamped in events:
            self.add(stamped)

    def add(self, stamped: Stamped) -> None:
        """Adds the event ``stamped``."""
        time, _, actor, event = stamped
        if actor is None or not isinstance(event, _OF_CONTEXTS):
            return
        key = actor.job, event.context
        context = self.all.get(key)
        if context is None:
            context = self.all[key] = Context(*key)
        context.workers[actor.rank] = actor.name
        if isinstance(event, SendRecorded):
            number = event.autograd_id
            context.sends[number] = Send(number, actor, event.peer, event.message_id, event.is_reply, time)
        elif not isinstance(event, ContextCreated):
            # A pass may be met first by a group, if its beginning was not recorded or is read later.
            each = context.passes.setdefault(event.pass_id, Pass(event.pass_id, time))
            each.began = min(each.began, time)
            if isinstance(event, GroupExecuted):
                recvs = tuple(recv for recv, _ in event.recvs)
                group = Group(actor, event.pass_id, time, event.nanoseconds, event.sends, recvs)
                context.groups.append(group)
                return
            each.actor = each.actor or actor
            if isinstance(event, PassFinished):
                each.ended, each.failed = time, event.failed


_OF_CONTEXTS = (ContextCreated, SendRecorded, PassStarted, PassFinished, GroupExecuted)
