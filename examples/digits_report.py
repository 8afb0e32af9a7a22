"""What came of training on the digits: a table in the terminal and a picture. Knows of no worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

GOAL = 0.97


class History(NamedTuple):
    """How training went: a loss for each step, the accuracy on held-out images after each epoch."""

    losses: list[float]
    accuracies: list[float]
    seconds: float


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """The share that is right, from 0 to 1."""
    return (predictions == labels).float().mean().item()


def confusion(predictions: Tensor, labels: Tensor) -> Tensor:
    """How often each digit (row) was read as which (column)."""
    return torch.bincount(10 * labels + predictions, minlength=100).reshape(10, 10)


def print_table(table: Tensor) -> None:
    """Show the confusion table, with the accuracy for each digit."""
    from rich.console import Console
    from rich.table import Table

    view = Table(title="held-out digits: what they are, and what they were read as", title_style="bold")
    view.add_column("is", justify="right", style="bold")
    for digit in range(10):
        view.add_column(str(digit), justify="right")
    view.add_column("right", justify="right")
    for digit, row in enumerate(table.tolist()):
        cells = [_cell(count, read_as == digit) for read_as, count in enumerate(row)]
        view.add_row(str(digit), *cells, f"{row[digit] / max(1, sum(row)):.1%}")
    Console().print(view)


def _cell(count: int, is_right: bool) -> str:
    if is_right:
        return f"[green]{count}[/]"
    return f"[bold red]{count}[/]" if count else "[dim]·[/]"


def save_picture(history: History, table: Tensor, path: Path) -> None:
    """Write loss, accuracy and confusion table, side by side, as PNG to ``path``."""
    import matplotlib  # here and not above: it takes a second, and training need not wait for it
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.titlepad": 10}):
        figure = Figure(figsize=(13, 4), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
        _draw_loss(left, history)
        _draw_accuracy(middle, history.accuracies)
        _draw_confusion(right, table)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _draw_loss(axes: Axes, history: History) -> None:
    epochs = len(history.accuracies)
    steps = len(history.losses) // epochs
    means = torch.tensor(history.losses).reshape(epochs, steps).mean(dim=1).tolist()
    moments = [step / steps for step in range(1, len(history.losses) + 1)]
    middles = [epoch + 0.5 for epoch in range(epochs)]
    axes.plot(moments, history.losses, color="#9ecae1", linewidth=0.8, label="each step")
    axes.plot(middles, means, color="#08519c", linewidth=2, label="mean of an epoch")
    axes.set(title="Training loss", xlabel="epoch", ylabel="cross entropy", yscale="log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)


def _draw_accuracy(axes: Axes, accuracies: list[float]) -> None:
    percent = [100 * value for value in accuracies]
    axes.axhline(100 * GOAL, color="#bbbbbb", linestyle="--", linewidth=1, label=f"goal: {GOAL:.0%}")
    axes.plot(range(1, len(percent) + 1), percent, color="#238b45", linewidth=2, marker="o", markersize=3.5)
    axes.set(title=f"Held-out digits read right: {percent[-1]:.1f} %", xlabel="epoch", ylabel="%")
    axes.set_ylim(min(90, *percent) - 1, 100.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="lower right")


def _draw_confusion(axes: Axes, table: Tensor) -> None:
    axes.imshow(table.float().sqrt().tolist(), cmap="Blues")
    for row, column in torch.nonzero(table).tolist():
        colour = "white" if row == column else "#cb181d"
        count = str(int(table[row, column]))
        axes.text(column, row, count, ha="center", va="center", color=colour, fontsize=8)
    axes.set(title="What was read as what", xlabel="read as", ylabel="is", xticks=range(10), yticks=range(10))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
