"""The distributed autograd graph of one context, from a trace: job -> data, and data -> text or DOT.

Workers recorded sends in the forward pass; in a backward pass, groups of nodes run when the gradients of
their sends arrive, and send gradients on to the sends of others (their recvs). A send that a finished pass
never reached went unused, which fast mode forbids and other modes pay for (docs/autograd.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from zmqgrad.errors import TraceError
from zmqgrad.trace.events import (
    ContextCreated,
    GroupExecuted,
    MessageSent,
    PassFinished,
    PassStarted,
    RequestDescribed,
    SendRecorded,
)
from zmqgrad.trace.job import Job
from zmqgrad.trace.model import Actor, Stamped
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import REQUEST


class Send(msgspec.Struct):
    """Tensors that ``source`` sent to ``target``, whose gradients come back. Times are those of the job."""

    id: int
    source: str
    target: str
    time: int
    function: str = ""
    is_reply: bool = False
    uses: list[int] = []
    """The passes whose gradients reached it."""

    @property
    def description(self) -> str:
        """What was sent."""
        return f"{'result' if self.is_reply else 'arguments'} of {self.function or 'a call'}"


class Group(msgspec.Struct):
    """Groups of nodes that ``worker`` ran at once. ``order`` counts in the pass, from 1."""

    worker: str
    began: int
    nanoseconds: int
    sends: tuple[int, ...]
    recvs: tuple[int, ...]
    order: int = 0

    @property
    def is_root(self) -> bool:
        """Whether it began the pass."""
        return not self.sends


class Pass(msgspec.Struct):
    """A backward pass that ``worker`` began. ``nanoseconds`` None: it has not ended."""

    id: int
    worker: str
    began: int
    nanoseconds: int | None = None
    failed: bool = False
    groups: list[Group] = []


class Graph(msgspec.Struct):
    """The graph of context ``context``."""

    context: int
    workers: list[str]
    sends: list[Send]
    passes: list[Pass]

    def unused(self) -> list[Send]:
        """The sends that no pass has reached, if one has ended; in fast mode, it fails because of them."""
        if not any(each.nanoseconds is not None for each in self.passes):
            return []
        return [send for send in self.sends if not send.uses]


class ContextRow(msgspec.Struct):
    """What a list of contexts shows of each."""

    context: int
    workers: int = 0
    sends: int = 0
    passes: int = 0
    nanoseconds: int = 0
    unused: int = 0


def contexts(job: Job) -> list[ContextRow]:
    """All contexts of a job, in the order of their beginning."""
    return [
        ContextRow(
            each.context,
            len(each.workers),
            len(each.sends),
            len(each.passes),
            sum(p.nanoseconds or 0 for p in each.passes),
            len(each.unused()),
        )
        for each in _Builder().read(job.events())
    ]


def graph(job: Job, context: int | None = None) -> Graph:
    """The graph of a context; None: of the last one that has a backward pass.

    Raises:
        TraceError: if the trace has no such context.
    """
    found = _Builder(context).read(job.events())
    if context is not None:
        for each in found:
            if each.context == context:
                return each
        raise TraceError(
            f"{job.directory} has no autograd context {show_id(context)}: "
            "`zmqgrad trace graph --list` shows them"
        )
    if not found:
        raise TraceError(f"{job.directory} has no autograd contexts: the job used no autograd.context()")
    return next((each for each in reversed(found) if each.passes), found[-1])


class _Builder:
    """Collects the graph of ``context``, or of all."""

    def __init__(self, context: int | None = None) -> None:
        self._context = context
        self._graphs: dict[int, Graph] = {}
        self._sends: dict[int, Send] = {}
        self._passes: dict[int, Pass] = {}
        self._targets: dict[int, tuple[Send, int]] = {}  # sends whose target is known by its rank
        self._requests: dict[tuple[int, int], str] = {}  # functions by worker and message id
        self._replies: list[tuple[Send, int, int]] = []
        self._names: dict[int, str] = {}

    def read(self, events: Iterator[Stamped]) -> list[Graph]:
        """Returns the graphs, oldest first."""
        for stamped in events:
            if stamped.actor is not None:
                self._add(stamped, stamped.actor)
        for send, rank in self._targets.values():
            send.target = self._names.get(rank, f"worker {rank}")
        for send, rank, message_id in self._replies:
            send.function = self._requests.get((rank, message_id), "")
        for each in self._graphs.values():
            self._finish(each)
        return list(self._graphs.values())

    def _add(self, stamped: Stamped, actor: Actor) -> None:
        event = stamped.event
        context = getattr(event, "context", 0)
        if isinstance(event, RequestDescribed):
            if (actor.rank, event.message_id) in self._requests:  # it follows the send of the request
                self._requests[actor.rank, event.message_id] = event.function
            return
        if not context or (self._context is not None and context != self._context):
            return
        if isinstance(event, MessageSent):
            if event.kind & REQUEST:
                name = stamped.process.names.get(event.name, "") if event.name else ""
                self._requests[actor.rank, event.message_id] = name
        elif isinstance(event, _OF_CONTEXTS):
            self._names[actor.rank] = actor.name
            found = self._graphs.get(context)
            if found is None:
                found = self._graphs[context] = Graph(context, [], [], [])
            if actor.name not in found.workers:
                found.workers.append(actor.name)
            self._apply(found, stamped.time, actor, event)

    def _apply(self, found: Graph, time: int, actor: Actor, event: object) -> None:
        if isinstance(event, SendRecorded):
            send = Send(event.autograd_id, actor.name, "", time, is_reply=event.is_reply)
            found.sends.append(send)
            self._sends[send.id] = send
            self._targets[send.id] = send, event.peer
            requester = event.peer if event.is_reply else actor.rank
            self._replies.append((send, requester, event.message_id))
        elif isinstance(event, PassStarted):
            self._pass(found, event.pass_id, actor.name, time)
        elif isinstance(event, PassFinished):
            ended = self._pass(found, event.pass_id, actor.name, time)
            ended.nanoseconds, ended.failed = time - ended.began, event.failed
        elif isinstance(event, GroupExecuted):
            recvs = tuple(recv for recv, _ in event.recvs)
            group = Group(actor.name, time, event.nanoseconds, event.sends, recvs)
            self._pass(found, event.pass_id, "", time).groups.append(group)

    def _pass(self, found: Graph, number: int, worker: str, time: int) -> Pass:
        """The pass; made here if its beginning was not recorded, or comes later."""
        known = self._passes.get(number)
        if known is None:
            known = self._passes[number] = Pass(number, worker, time)
            found.passes.append(known)
        known.worker = known.worker or worker
        known.began = min(known.began, time)
        return known

    def _finish(self, found: Graph) -> None:
        found.workers.sort(key=lambda name: min(r for r, n in self._names.items() if n == name))
        found.sends.sort(key=lambda send: send.time)
        for each in found.passes:
            each.groups.sort(key=lambda group: group.began)
            for order, group in enumerate(each.groups, 1):
                group.order = order
                for number in (*group.sends, *group.recvs):
                    send = self._sends.get(number)
                    if send is not None and each.id not in send.uses:
                        send.uses.append(each.id)


_OF_CONTEXTS = (ContextCreated, SendRecorded, PassStarted, PassFinished, GroupExecuted)


# ---- text -----------------------------------------------------------------------------------------------


def text(found: Graph) -> Iterator[str]:
    """Yields the lines of a tree: the sends of each worker, then each pass with its groups in their order."""
    sends = {send.id: send for send in found.sends}
    unused = found.unused()
    yield f"context {show_id(found.context)}: {len(found.workers)} workers, {len(found.sends)} sends"
    for worker in found.workers:
        yield f"├─ {worker}"
        lines = [
            f"send {show_id(send.id)} to {send.target}: {send.description}{' (unused)' * (send in unused)}"
            for send in found.sends
            if send.source == worker
        ]
        yield from _branches(lines or ["no sends"])
    for each in found.passes:
        yield f"├─ {describe_pass(each)}"
        yield from _branches([_describe(group, each, sends) for group in each.groups])
    if unused:
        names = ", ".join(f"{show_id(s.id)} ({s.source} -> {s.target}, {s.description})" for s in unused)
        yield f"└─ {len(unused)} of {len(found.sends)} sends went unused: {names}"
    else:
        yield "└─ no send went unused" if found.passes else "└─ no backward pass"


def _branches(lines: Sequence[str]) -> Iterator[str]:
    for i, line in enumerate(lines, 1):
        yield f"│  {'└─' if i == len(lines) else '├─'} {line}"


def _describe(group: Group, each: Pass, sends: Mapping[int, Send]) -> str:
    causes = ", ".join(f"send {show_id(number)}" for number in group.sends) or "roots"
    targets = ", ".join(
        f"{sends[n].source if n in sends else 'unknown'} (send {show_id(n)})" for n in group.recvs
    )
    return (
        f"{group.order}. {group.worker} at +{_milliseconds(group.began - each.began)} "
        f"for {_milliseconds(group.nanoseconds)}: {causes} -> {targets or 'leaves'}"
    )


def describe_pass(each: Pass) -> str:
    """One line about a pass."""
    took = "not finished" if each.nanoseconds is None else _milliseconds(each.nanoseconds)
    failed = ", failed" if each.failed else ""
    return f"backward pass {show_id(each.id)} from {each.worker or 'unknown'}: {took}{failed}"


def _milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.2f} ms"


# ---- DOT ------------------------------------------------------------------------------------------------


def dot(found: Graph, number: int = -1) -> str:
    """The graph in the language of Graphviz.

    Workers are boxes, with their sends and groups. Arrows are gradients of a pass. Dashed: a send that went
    unused.

    Args:
        number: which pass, in the order of their beginning; the last one if it is left out.
    """
    each = found.passes[number] if found.passes else Pass(0, "", 0)
    unused = {send.id for send in found.unused()}
    lines = [
        "digraph context {",
        f"  rankdir=LR; ranksep=0.8; labelloc=t; label={_quote(title(found, number))};",
        "  node [fontsize=10];",
    ]
    for i, worker in enumerate(found.workers):
        lines.append(f"  subgraph cluster_{i} {{")
        lines.append(f'    label={_quote(worker)}; style="rounded,filled"; fillcolor="#f4f6fa";')
        for send in found.sends:
            if send.source == worker:
                style = ', style=dashed, color="#c0392b"' if send.id in unused else ""
                label = f"send {show_id(send.id)}\n{send.description}"
                lines.append(f"    s{send.id} [shape=box, label={_quote(label)}{style}];")
        for group in each.groups:
            if group.worker == worker:
                label = f"{group.order}. {'roots' if group.is_root else 'group'}\n"
                label += f"+{_milliseconds(group.began - each.began)}\n{_milliseconds(group.nanoseconds)}"
                lines.append(f"    g{group.order} [label={_quote(label)}];")
        lines.append("  }")
    known = {send.id for send in found.sends}
    for group in each.groups:
        lines += [f"  s{n} -> g{group.order};" for n in group.sends if n in known]
        lines += [f"  g{group.order} -> s{n};" for n in group.recvs if n in known]
    return "\n".join([*lines, "}"]) + "\n"


def title(found: Graph, number: int = -1) -> str:
    """The title of a picture of one pass."""
    shown = describe_pass(found.passes[number]) if found.passes else "no backward pass"
    return f"context {found.context}, {shown}"


def _quote(label: str) -> str:
    escaped = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
