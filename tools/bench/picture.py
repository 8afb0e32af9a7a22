"""The results as a picture: time over size, and each row's ratio to torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.bench.limits import COPIES
from tools.bench.results import LIMIT, Results
from tools.bench.sides import OURS, TORCH
from tools.bench.workloads import SIZES, size_name

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#08519c", "#d95f0e", "#888888"


def save_picture(results: Results, subtitle: str, path: Path) -> None:
    """Write the PNG. (ImportError: matplotlib is not installed.)"""
    import matplotlib  # here and not above: the table does not need it
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.titlepad": 10}):
        compared = [row for row in results.rows if results.ratio(row) is not None]
        figure = Figure(figsize=(14, max(6.0, 1.5 + 0.2 * len(compared))), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
        _draw_sizes(left, results)
        _draw_ratios(right, [(row.name, results.ratio(row) or 0.0) for row in compared])
        figure.suptitle(subtitle, fontsize=9, color=GREY)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


STYLES = ((BLUE, "o-"), (ORANGE, "o-"), (GREY, "--"), (BLUE, "o:"))

Curves = dict[str, dict[int, float]]
"""The points of each line, by its name."""


def save_curves(panels: dict[str, Curves], path: Path, xlabel: str, ylabel: str, sizes: bool = False) -> None:
    """Write a PNG with a panel for each title. ``sizes``: of x, in bytes; both axes are logarithmic."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=((5.5 if sizes else 4) * len(panels), 4.2), layout="constrained")
        rows = figure.subplots(1, len(panels), sharey=sizes, squeeze=False)
        for axes, (title, lines) in zip(rows[0], panels.items(), strict=True):
            for (label, points), (colour, style) in zip(lines.items(), STYLES, strict=False):
                if points:
                    xs, ys = zip(*sorted(points.items()), strict=True)
                    axes.plot(xs, ys, style, color=colour, markersize=4, label=label)
            axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
            if sizes:
                ticks = sorted({size for points in lines.values() for size in points})
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_xticks(ticks, [size_name(size) for size in ticks], rotation=45)
                axes.minorticks_off()
            else:
                axes.set_ylim(0, None)
            axes.grid(alpha=0.3)
            if axes.get_lines():
                axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def _draw_sizes(axes: Axes, results: Results) -> None:
    for side, colour in ((OURS, BLUE), (TORCH, ORANGE)):
        for way, style in (("send", "-"), ("echo", ":")):
            names = {size: f"{way}_{size_name(size)}" for size in SIZES}
            _line(
                axes, results, side, names, color=colour, linestyle=style, marker="o", label=f"{side}, {way}"
            )
    copies = {size: name for name, size in COPIES.items()}
    _line(axes, results, LIMIT, copies, color=GREY, linestyle="--", marker="", label="a warm copy")
    round_trip = results.median(LIMIT, "round_trip")
    if round_trip is not None:
        axes.axhline(round_trip, color=GREY, linestyle="-.", linewidth=1, label="bare ZeroMQ round trip")
    if not axes.get_lines():
        _say(axes, "no tensors were sent")
        return
    axes.set(title="A call with a tensor", xlabel="size of the tensor", ylabel="seconds")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SIZES, [size_name(size) for size in SIZES], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _line(
    axes: Axes, results: Results, side: str, names: dict[int, str],
    color: str, linestyle: str, marker: str, label: str,
) -> None:  # fmt: skip
    points = [(size, median) for size, name in names.items() if (median := results.median(side, name))]
    if points:
        sizes, seconds = zip(*points, strict=True)
        axes.plot(
            sizes, seconds, color=color, linestyle=linestyle, marker=marker, markersize=4, linewidth=1.8,
            label=label,
        )  # fmt: skip


def _draw_ratios(axes: Axes, ratios: list[tuple[str, float]]) -> None:
    axes.set_title("Time that zmqgrad takes where torch takes 1")
    if not ratios:
        _say(axes, "torch was not measured")
        return
    names = [name for name, _ in reversed(ratios)]
    values = [value for _, value in reversed(ratios)]
    colours = [BLUE if value <= 1 else ORANGE for value in values]
    axes.barh(names, [value - 1 for value in values], left=1, color=colours, height=0.7)
    axes.set_xscale("log")
    low, high = min(0.09, *values), max(2.0, *values)
    axes.set_xlim(low / 1.6, high * 1.6)
    ticks = [t for t in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if low / 1.6 <= t <= high * 1.6]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=0.8)
    for place, value in enumerate(values):
        side = "right" if value <= 1 else "left"
        gap = " " if value > 1 else ""
        axes.text(
            value / 1.03 if value <= 1 else value,
            place,
            f"{gap}{value:.2f}",
            ha=side,
            va="center",
            fontsize=7,
        )
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.margins(y=0.01)


def _say(axes: Axes, text: str) -> None:
    """Instead of a drawing."""
    axes.text(0.5, 0.5, text, ha="center", color=GREY, transform=axes.transAxes)
    axes.set_axis_off()
