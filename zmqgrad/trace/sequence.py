"""A call, an autograd context or a rendezvous round as a sequence diagram. Pure: :class:`Job` to steps.

A call is shown with what it caused: the calls that its thread made at the server until it finished, and
theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from zmqgrad.errors import TraceError
from zmqgrad.trace.contexts import Context, Contexts, Pass
from zmqgrad.trace.cycles import COLLECTIVES
from zmqgrad.trace.events import RendezvousStep
from zmqgrad.trace.job import Job
from zmqgrad.trace.kinds import ONE_WAY, REPEATED, is_store
from zmqgrad.trace.labels import actor_label, ends, id_label
from zmqgrad.trace.model import Call, Message
from zmqgrad.trace.tail import recorded
from zmqgrad.trace.waits import may_be_answered
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import RESPONSE, MessageType

_STATE_CHANGES = frozenset(
    (MessageType.STORE_COMPARE_SET, MessageType.KEY_CREATED, MessageType.KEY_UPDATED, MessageType.KEY_DELETED)
)

STUCK_NANOSECONDS = 1_000_000_000
"""A call without a reply that was sent this long before the end is stuck."""


class Step(msgspec.Struct):
    """A message from lane ``source`` to lane ``target``, or a note at ``source`` if ``target`` is empty."""

    time: int
    """When it was sent, or when what is noted began."""
    source: str
    target: str
    text: str
    nanoseconds: int | None = None
    """How long the message took to arrive, or what is noted took; None: unknown, or it did not end."""
    reply: bool = False
    failed: bool = False


class Diagram(msgspec.Struct):
    """Steps in order of time; ``lanes`` names what takes part, in the order of first appearance."""

    title: str
    lanes: list[str]
    steps: list[Step]


def call_diagram(job: Job, message_id: int | None = None, worker: str | None = None) -> Diagram:
    """One call and what it caused.

    Args:
        message_id: which call; None: the one that is stuck longest, or else the slowest one with a reply.
        worker: that made the call; needed if several have calls of this number.

    Raises:
        TraceError: if there is no such call, or there are several.
    """
    root = _find(job, message_id, worker)
    end = root.reply.received if root.reply is not None else None
    during = [c for c in job.calls() if _overlaps(c, root.request.time, end)]
    chosen = _descendants(root, during)
    title = f"call #{id_label(root.request)} {root.function or root.request.type}"
    return _diagram(title, (step for call in chosen for step in _call_steps(call)))


def context_diagram(job: Job, number: int | None = None) -> Diagram:
    """The messages and backward passes of one distributed autograd context, and which sends went unused.

    Args:
        number: which context, of the last group that has it; None: the last one with a backward pass.

    Raises:
        TraceError: if the trace does not have it.
    """
    found = list(Contexts(job.events()).all.values())[::-1]
    if not found:
        raise TraceError(f"{job.directory} has no autograd contexts: the job used no autograd.context()")
    if number is None:
        number = next((each for each in found if each.passes), found[0]).number
    context = next((each for each in found if each.number == number), None)
    if context is None:
        raise TraceError(f"{job.directory} has no autograd context {show_id(number)}; --list shows all")
    unused = {send.id for send in context.unused()}
    sends = {(send.message_id, send.is_reply): send for send in context.sends.values()}
    steps = []
    for line in recorded(job.messages()):
        if _is_in(context, line.message):
            step = _message_step(line.message)
            send = sends.get((line.message.message_id, step.reply))
            if send is not None:
                step.text += f", send {show_id(send.id)}{' (unused)' * (send.id in unused)}"
            steps.append(step)
    for each in context.passes.values():
        steps += _pass_steps(each, context)
    count = f"{len(context.workers)} workers, {len(sends)} sends"
    calls = job.calls() if unused else ()
    functions = {c.request.message_id: c.function for c in calls if _is_in(context, c.request)}
    names = [
        f"{show_id(s.id)} ({'result' if s.is_reply else 'arguments'} of {functions.get(s.message_id)})"
        for s in context.unused()
    ]
    more = f", {len(unused)} unused: {', '.join(names)}" if unused else ""
    return _diagram(f"autograd context {show_id(number)}: {count}{more}", steps)


def _is_in(context: Context, message: Message) -> bool:
    worker = message.source or message.target
    return message.context == context.number and worker is not None and worker.job == context.job


def round_diagram(job: Job, number: int) -> Diagram:
    """The actions of all nodes in one round of the elastic rendezvous, and the changes of the shared state.

    Raises:
        TraceError: if the trace does not have it.
    """
    steps: list[Step] = []
    processes = set()
    for time, process, actor, event in job.events():
        if isinstance(event, RendezvousStep) and event.round == number and actor is not None:
            text = f"{event.action} ({event.participants} participants, {event.waiting} waiting)"
            steps.append(Step(time, actor_label(actor), "", text))
            processes.add(process.path)
    if not steps:
        raise TraceError(f"the trace has no round {number} of a rendezvous")
    first, last = steps[0].time, steps[-1].time
    for message in job.messages():
        if message.kind in _STATE_CHANGES and first <= message.time <= last:
            node = message.source if message.kind == MessageType.STORE_COMPARE_SET else message.target
            if node is not None and node.process.path in processes:
                steps.append(_message_step(message))
    return _diagram(f"rendezvous round {number}", steps)


# ---- calls -------------------------------------------------------------------------------------------------


def _find(job: Job, message_id: int | None, worker: str | None) -> Call:
    found: list[Call] = []
    stuck: list[Call] = []
    end = job.span()[1] - STUCK_NANOSECONDS
    for call in job.calls():
        if is_store(call.request.kind) or (worker is not None and ends(call.request)[0] != worker):
            continue
        if message_id is not None:
            if call.request.message_id == message_id:
                found.append(call)
        elif _is_stuck(call, job, end):
            stuck = [min([call, *stuck], key=lambda c: c.request.sent or 0)]
        elif call.duration is not None and (not found or call.duration > (found[0].duration or 0)):
            found = [call]
    found = stuck or found
    if not found:
        what = "a call with a reply" if message_id is None else f"call #{show_id(message_id)}"
        raise TraceError(f"the trace does not have {what}" + (f" of {worker}" if worker else ""))
    if len(found) > 1:
        callers = ", ".join(sorted(ends(call.request)[0] for call in found))
        raise TraceError(f"several workers made a call #{id_label(found[0].request)}, choose one: {callers}")
    return found[0]


def _is_stuck(call: Call, job: Job, before: int) -> bool:
    """Whether ``call`` was sent before this time and has no reply. At a barrier, workers wait for others."""
    request = call.request
    waits = request.kind not in ONE_WAY | REPEATED and not call.function.startswith(COLLECTIVES)
    is_open = waits and not (call.is_complete or call.given_up) and not may_be_answered(call, job)
    return is_open and request.sent is not None and request.sent <= before


def _overlaps(call: Call, begin: int, end: int | None) -> bool:
    sent = call.request.sent
    return sent is not None and sent >= begin and (end is None or sent <= end)


def _descendants(root: Call, calls: Sequence[Call]) -> list[Call]:
    """``root`` and the calls that its thread made while it ran, and theirs."""
    by_thread: dict[tuple[int, int], list[Call]] = {}
    for call in calls:
        if call.request.source is not None:
            key = (id(call.request.source.process), call.request.sender_thread)
            by_thread.setdefault(key, []).append(call)
    found = [root]
    seen = {root.request.key}
    for parent in found:
        target = parent.request.target
        if target is None or parent.started is None:
            continue
        for call in by_thread.get((id(target.process), parent.thread), ()):
            sent = call.request.sent or 0
            inside = parent.started <= sent and (parent.finished is None or sent <= parent.finished)
            if inside and call.request.key not in seen:
                seen.add(call.request.key)
                found.append(call)
    return found


def _call_steps(call: Call) -> Iterable[Step]:
    yield _message_step(call.request)
    target = ends(call.request)[1]
    if call.started is not None:
        if call.queued:
            yield Step(call.started - call.queued, target, "", "queued", call.queued)
        took = None if call.finished is None else call.finished - call.started
        text = f"runs {call.function}".rstrip() if took is None else f"ran {call.function}".rstrip()
        yield Step(call.started, target, "", text, took, failed=call.failed)
    if call.reply is not None:
        yield _message_step(call.reply)
    if call.given_up is not None:
        yield Step(call.given_up, ends(call.request)[0], "", f"gets {call.error}", failed=True)


# ---- steps -------------------------------------------------------------------------------------------------


def _message_step(message: Message) -> Step:
    reply = bool(message.kind & RESPONSE)
    text = f"{message.type} {message.name if not reply or is_store(message.kind) else ''}".rstrip()
    failed = message.kind == MessageType.EXCEPTION
    return Step(message.time, *ends(message), f"{text} #{id_label(message)}", message.transfer, reply, failed)


def _pass_steps(each: Pass, context: Context) -> Iterable[Step]:
    name, sends = f"backward pass {show_id(each.id)}", context.sends
    if each.actor is not None:
        lane = actor_label(each.actor)
        yield Step(each.began, lane, "", f"{name} begins")
        if each.ended is not None:
            yield Step(each.ended, lane, "", f"{name} ends", each.ended - each.began, failed=each.failed)
    groups = [group for group in context.groups if group.pass_id == each.id]
    for order, group in enumerate(sorted(groups, key=lambda g: g.began), 1):
        causes = ", ".join(f"send {show_id(n)}" for n in group.sends) or "roots"
        targets = ", ".join(
            f"send {show_id(n)} of {sends[n].actor.name if n in sends else 'unknown'}" for n in group.recvs
        )
        text = f"ran group {order}: {causes} -> {targets or 'leaves'}"
        yield Step(group.began, actor_label(group.actor), "", text, group.nanoseconds)


def _diagram(title: str, steps: Iterable[Step]) -> Diagram:
    ordered = sorted(steps, key=lambda step: step.time)
    lanes = dict.fromkeys(lane for step in ordered for lane in (step.source, step.target) if lane)
    return Diagram(title, list(lanes), ordered)
