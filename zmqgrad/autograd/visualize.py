"""A context as people see it: what was sent, what waits for what, on all workers that take part.

    print(describe_context(context_id))
    Path("context.dot").write_text(draw_context(context_id))     # dot -Tsvg context.dot

Before the first backward pass this is what one would find; afterwards, how the last one stands.
"""

from __future__ import annotations

from zmqgrad.autograd.backward.executor import LocalPass, PassSnapshot
from zmqgrad.autograd.context import ActiveContext
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.errors import AutogradError
from zmqgrad.rpc import rpc_sync
from zmqgrad.rpc.current import current_worker
from zmqgrad.wire.ids import show_id


def _look(context_id: int) -> tuple[PassSnapshot, set[int]]:
    """Runs on each worker: its part, and the workers that it exchanged messages with."""
    worker = current_worker()
    context = autograd_of(worker).contexts.find(context_id)
    with context.pass_lock:
        last = list(context.passes.values())[-1:]
    work = last[0] if last else LocalPass(context, worker.id, retain_graph=True)
    return work.snapshot(worker.name), context.peers()


def look_at(context_id: int) -> list[PassSnapshot]:
    """The part of each worker, by its number; workers that have released the context are left out.

    Raises:
        AutogradError: if the context is not known here.
    """
    found: dict[int, PassSnapshot] = {}
    todo = [current_worker().id]
    asked: set[int] = set()
    own, _ = _look(context_id)
    with ActiveContext(None):  # looking leaves no trace
        while todo:
            worker = todo.pop()
            if worker in asked:
                continue
            asked.add(worker)
            try:
                found[worker], peers = (
                    _look(context_id) if worker == own.worker else rpc_sync(worker, _look, (context_id,))
                )
            except AutogradError:
                continue
            todo += peers
    return [found[worker] for worker in sorted(found)]


def describe_context(context_id: int) -> str:
    """Entries and groups of each worker as text: what arrived, what ran, what waits for what."""
    return "\n".join(f"{view.name}: " + view.text.replace("\n", "\n  ") for view in look_at(context_id))


def draw_context(context_id: int) -> str:
    """The context for Graphviz: a box a worker, in it its sends and groups; between boxes, gradients.

    Dashed: has not come, or has not run.
    """
    views = look_at(context_id)
    lines = ["digraph context {", "  rankdir=LR; node [fontsize=10];"]
    for view in views:
        lines.append(f"  subgraph cluster_{view.worker} {{")
        lines.append(f"    label={_quote(view.name)};")
        used = {entry for flow in view.groups for entry in flow.entries}
        if 0 in used and view.started:
            lines.append(f"    roots_{view.worker} [label=roots, shape=doublecircle];")
        for number, _, what in view.sends:
            style = "solid" if number in view.arrived else "dashed"
            label = _quote(f"send {show_id(number)}\n{what}")
            lines.append(f"    s{number} [shape=box, style={style}, label={label}];")
        for i, flow in enumerate(view.groups):
            style = "solid" if flow.ran else "dashed"
            lines.append(f'    g{view.worker}_{i} [shape=ellipse, style={style}, label="group {i}"];')
        lines.append("  }")
    for view in views:
        for i, flow in enumerate(view.groups):
            group = f"g{view.worker}_{i}"
            for entry in flow.entries:
                if entry or view.started:
                    lines.append(f"  {f's{entry}' if entry else f'roots_{view.worker}'} -> {group};")
            for number, _ in flow.recvs:
                lines.append(f"  {group} -> s{number} [style={'solid' if flow.ran else 'dashed'}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
