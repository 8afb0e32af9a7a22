"""The distributed autograd graph of one context, with names: job -> data, and data -> text or DOT.

A send that a finished pass never reached went unused, which fast mode forbids and other modes pay for
(docs/autograd.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from zmqgrad.errors import TraceError
from zmqgrad.trace.contexts import Context, Contexts
from zmqgrad.trace.events import MessageSent, RequestDescribed
from zmqgrad.trace.job import Job
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
    found = Contexts()
    for stamped in job.events():
        found.add(stamped)
    return [
        ContextRow(
            each.number,
            len(each.workers),
            len(each.sends),
            len(each.passes),
            sum(p.ended - p.began for p in each.passes.values() if p.ended is not None),
            len(each.unused()),
        )
        for each in found.all.values()
    ]


def graph(job: Job, context: int | None = None) -> Graph:
    """The graph of a context; None: of the last one that has a backward pass.

    Raises:
        TraceError: if the trace has no such context.
    """
    contexts = Contexts()
    functions: dict[tuple[int, int], str] = {}  # by caller and message id
    for stamped in job.events():
        _, process, actor, event = stamped
        contexts.add(stamped)
        if actor is None:
            continue
        if isinstance(event, MessageSent):
            if event.context and event.kind & REQUEST:
                functions[actor.rank, event.message_id] = process.names.get(event.name, "")
        elif isinstance(event, RequestDescribed) and (actor.rank, event.message_id) in functions:
            functions[actor.rank, event.message_id] = event.function  # it follows the send of the request
    found = list(contexts.all.values())
    if not found and context is None:
        raise TraceError(f"{job.directory} has no autograd contexts: the job used no autograd.context()")
    if context is None:
        chosen = next((each for each in reversed(found) if each.passes), found[-1])
    elif context in contexts.all:
        chosen = contexts.all[context]
    else:
        raise TraceError(
            f"{job.directory} has no autograd context {show_id(context)}: "
            "`zmqgrad trace graph --list` shows them"
        )
    return _with_names(chosen, functions, {worker.rank: worker.name for worker in job.workers()})


def _with_names(
    context: Context, functions: Mapping[tuple[int, int], str], all_names: Mapping[int, str]
) -> Graph:
    names = {**all_names, **context.workers}
    sends = {
        send.id: Send(
            send.id,
            send.actor.name,
            names.get(send.peer, f"worker {send.peer}"),
            send.time,
            functions.get((send.peer if send.is_reply else send.actor.rank, send.message_id), ""),
            send.is_reply,
        )
        for send in sorted(context.sends.values(), key=lambda send: send.time)
    }
    passes = []
    for each in context.passes.values():
        took = None if each.ended is None else each.ended - each.began
        named = Pass(each.id, each.actor.name if each.actor else "", each.began, took, each.failed)
        passes.append(named)
        groups = [group for group in context.groups if group.pass_id == each.id]
        for order, group in enumerate(sorted(groups, key=lambda group: group.began), 1):
            named.groups.append(
                Group(group.actor.name, group.began, group.nanoseconds, group.sends, group.recvs, order)
            )
            for number in (*group.sends, *group.recvs):
                if number in sends and each.id not in sends[number].uses:
                    sends[number].uses.append(each.id)
    workers = list(dict.fromkeys(names[rank] for rank in sorted(context.workers)))
    return Graph(context.number, workers, list(sends.values()), passes)


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
