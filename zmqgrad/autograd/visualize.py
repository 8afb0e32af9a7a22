"""Text and Graphviz views of a context: its sends and groups on all participating workers.

    print(describe_context(context_id))
    Path("context.dot").write_text(draw_context(context_id))     # dot -Tsvg context.dot

Before the first backward pass they show the next one; afterwards the state of the last one.
"""

from __future__ import annotations

from zmqgrad.autograd.context import ActiveContext
from zmqgrad.autograd.engine.executor import LocalPass, PassSnapshot
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.errors import AutogradError, PeerLostError
from zmqgrad.rpc import rpc_sync
from zmqgrad.rpc.current import current_worker
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import PassOptions


def _snapshot(context_id: int) -> tuple[PassSnapshot, set[int]]:
    """Return the snapshot of this worker and its peers in the context. Runs on each worker."""
    worker = current_worker()
    context = autograd_of(worker).contexts.find(context_id)
    with context.pass_lock:
        last = list(context.passes.values())[-1:]
    local_pass = last[0] if last else LocalPass(context, worker.id, PassOptions(retain_graph=True))
    return local_pass.snapshot(worker.name), context.peers()


def snapshots(context_id: int) -> list[PassSnapshot]:
    """Return a snapshot for each worker, ordered by worker id.

    Those that have released the context, or are gone, are left out.

    Raises:
        AutogradError: if the context is not known here.
    """
    found: dict[int, PassSnapshot] = {}
    todo = [current_worker().id]
    visited: set[int] = set()
    own, _ = _snapshot(context_id)
    with ActiveContext(None):  # these calls are not part of the context
        while todo:
            worker = todo.pop()
            if worker in visited:
                continue
            visited.add(worker)
            try:
                found[worker], peers = (
                    _snapshot(context_id)
                    if worker == own.worker
                    else rpc_sync(worker, _snapshot, (context_id,))
                )
            except (AutogradError, PeerLostError):
                continue
            todo += peers
    return [found[worker] for worker in sorted(found)]


def describe_context(context_id: int) -> str:
    """Return the state of a context on all its workers that are not gone, as text.

    Lists the entries and groups of each worker: what has arrived or run, and what waits for what.

    Args:
        context_id: the id of a context that this worker knows.

    Raises:
        AutogradError: if the context is not known here.

    Example:
        >>> with dist_autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(2, requires_grad=True),))
        ...     "worker1" in dist_autograd.describe_context(context_id)
        True
    """
    return "\n".join(f"{view.name}: " + view.text.replace("\n", "\n  ") for view in snapshots(context_id))


def draw_context(context_id: int) -> str:
    """Return a drawing of a context in the language of Graphviz.

    Each worker is a box with its sends and groups; arrows show the way of gradients. Dashed: a send whose
    gradient has not arrived, or a group that has not run.

    Args:
        context_id: the id of a context that this worker knows.

    Raises:
        AutogradError: if the context is not known here.

    Example:
        >>> with dist_autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(2, requires_grad=True),))
        ...     dist_autograd.draw_context(context_id).startswith("digraph")
        True
    """
    views = snapshots(context_id)
    lines = ["digraph context {", "  rankdir=LR; node [fontsize=10];"]
    for view in views:
        lines.append(f"  subgraph cluster_{view.worker} {{")
        lines.append(f"    label={_quote(view.name)};")
        used = {entry for group in view.groups for entry in group.entries}
        if 0 in used and view.started:
            lines.append(f"    roots_{view.worker} [label=roots, shape=doublecircle];")
        for number, _, what in view.sends:
            style = "solid" if number in view.arrived else "dashed"
            label = _quote(f"send {show_id(number)}\n{what}")
            lines.append(f"    s{number} [shape=box, style={style}, label={label}];")
        for i, group in enumerate(view.groups):
            style = "solid" if group.ran else "dashed"
            lines.append(f'    g{view.worker}_{i} [shape=ellipse, style={style}, label="group {i}"];')
        lines.append("  }")
    for view in views:
        for i, group in enumerate(view.groups):
            node = f"g{view.worker}_{i}"
            for entry in group.entries:
                if entry or view.started:
                    lines.append(f"  {f's{entry}' if entry else f'roots_{view.worker}'} -> {node};")
            for number, _ in group.recvs:
                lines.append(f"  {node} -> s{number} [style={'solid' if group.ran else 'dashed'}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
