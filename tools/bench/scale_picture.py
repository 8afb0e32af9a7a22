"""The figures of ``python -m tools.bench.scale`` over the number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tools.bench.picture import BLUE, GREY, ORANGE
from tools.bench.sides import OURS, TORCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figures = dict[str, dict[str, float]]
"""By size of the group, and name of the figure."""

PANELS = (
    ("joined seconds", "Time to start", "seconds"),
    ("all private", "Memory of a worker, private", "MiB"),
    ("all descriptors", "Descriptors of a worker", "descriptors"),
    ("all threads", "Threads of a worker", "threads"),
    ("all cpu ms/s", "Processor time of an idle worker", "ms per second"),
)


def save_picture(found: dict[str, Figures], path: Path) -> None:
    """Write the PNG. (ImportError: matplotlib is not installed.)"""
    import matplotlib  # here and not above: the table does not need it
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 7), layout="constrained")
        *panels, simulated = figure.subplots(2, 3).flat
        for axes, (name, title, unit) in zip(panels, PANELS, strict=True):
            for side, colour in ((OURS, BLUE), (TORCH, ORANGE)):
                _draw(axes, found.get(side, {}), name, colour, side)
            _label(axes, title, unit)
        for step, colour in (("one more joins", BLUE), ("one crashes", ORANGE), ("one leaves", GREY)):
            _draw(simulated, _messages(found.get("simulation", {}), step), step, colour, step)
        _label(simulated, "Messages of the store, simulated", "messages per worker")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def _messages(simulation: Figures, step: str) -> Figures:
    """Queries, replies and notifications of ``step`` for each worker."""
    kinds = ("queries", "replies", "notifications")
    return {
        size: {step: sum(figures[f"{step}: {kind}"] for kind in kinds) / int(size)}
        for size, figures in simulation.items()
    }


def _draw(axes: Axes, figures: Figures, name: str, colour: str, label: str) -> None:
    points = sorted((int(size), each[name]) for size, each in figures.items() if name in each)
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=label)


def _label(axes: Axes, title: str, unit: str) -> None:
    axes.set(title=title, xlabel="workers", ylabel=unit, ylim=(0, None))
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend(frameon=False)
