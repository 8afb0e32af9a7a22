"""A picture of one backward pass, drawn by matplotlib: a lane for each worker, groups in their order.

Time runs to the right, one column a group, so that short groups stay readable beside long ones.
"""

from __future__ import annotations

from pathlib import Path

from zmqgrad.errors import TraceError
from zmqgrad.trace.graph import Graph, Pass, title
from zmqgrad.wire.ids import show_id

_LANE, _GROUP, _UNUSED = "#eef2f8", "#4c78a8", "#c0392b"


MAX_INCHES = 150.0
"""Of the width; more groups get less room."""


def plot(found: Graph, path: Path, number: int = -1) -> None:
    """Draws pass ``number`` of ``found`` to ``path``, in the format of its suffix: svg, png or pdf.

    Raises:
        TraceError: if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise TraceError(
            f"drawing {path} needs Graphviz (its program dot) or matplotlib: pip install zmqgrad[trace]"
        ) from e
    each = found.passes[number] if found.passes else Pass(0, "", 0)
    unused = found.unused()
    lanes = {worker: -i for i, worker in enumerate(found.workers)}
    columns = len(each.groups) + 1
    # A figure of its own, not of pyplot, which would keep it and choose a backend for windows.
    figure = Figure(
        figsize=(min(max(7.0, 1.5 * columns + 1.5), MAX_INCHES), 1.1 * len(lanes) + 0.8), layout="constrained"
    )
    axes = figure.add_subplot()
    axes.set_title(title(found, number), fontsize=11, parse_math=False)
    axes.set_axis_off()
    for worker, y in lanes.items():
        axes.axhspan(y - 0.42, y + 0.42, color=_LANE, zorder=0)
        axes.text(-0.15, y, worker, weight="bold", ha="right", va="center", parse_math=False)
        missed = [send for send in unused if send.source == worker]
        if missed:
            shown = "\n".join(f"send {show_id(s.id)} to {s.target} unused:\n{s.description}" for s in missed)
            style = {"boxstyle": "round", "facecolor": "white", "edgecolor": _UNUSED, "linestyle": "--"}
            axes.text(0.0, y, shown, fontsize=7, color=_UNUSED, va="center", bbox=style, parse_math=False)
    origins: dict[int, int] = {}
    for group in each.groups:
        x, y = group.order, lanes[group.worker]
        label = f"{'roots' if group.is_root else f'group {x}'}\n{group.nanoseconds / 1e6:.2f} ms"
        style = {"boxstyle": "round,pad=0.4", "facecolor": _GROUP, "edgecolor": "none"}
        axes.text(x, y, label, color="white", fontsize=8, ha="center", va="center", bbox=style, zorder=3)
        axes.text(
            x, y - 0.36, f"+{(group.began - each.began) / 1e6:.2f} ms", fontsize=7, ha="center", color="#555"
        )
        for send in group.sends:
            if send in origins:
                begin = each.groups[origins[send] - 1]
                axes.annotate(
                    "",
                    (x, y),
                    (begin.order, lanes[begin.worker]),
                    arrowprops={
                        "arrowstyle": "-|>",
                        "shrinkA": 22,
                        "shrinkB": 22,
                        "color": "#333",
                        "lw": 1.2,
                    },
                )
                middle = (begin.order + x) / 2, (lanes[begin.worker] + y) / 2
                axes.text(*middle, f" send {show_id(send)}", fontsize=7, color="#333")
        origins.update(dict.fromkeys(group.recvs, group.order))
    axes.set_xlim(-0.9, columns)
    axes.set_ylim(min(lanes.values(), default=0) - 0.55, 0.55)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:  # ValueError: a format that it does not know
        raise TraceError(f"cannot draw {path}: {e}") from e
