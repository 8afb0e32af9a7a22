"""Reports for ``digits_pipeline.py``: a confusion matrix in the terminal, and a picture of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

GOAL = 0.97


class History(NamedTuple):
    """The loss of each step, the test accuracy after each epoch, and the duration of the training."""

    losses: list[float]
    accuracies: list[float]
    seconds: float


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """Return the fraction of correct predictions."""
    return (predictions == labels).float().mean().item()


def confusion(predictions: Tensor, labels: Tensor) -> Tensor:
    """Return the confusion matrix, shape (10, 10): rows are labels, columns are predictions."""
    return torch.bincount(10 * labels + predictions, minlength=100).reshape(10, 10)


def print_table(table: Tensor) -> None:
    """Print the confusion matrix, with the accuracy for each digit."""
    from rich.console import Console
    from rich.table import Table

    view = Table(title="confusion matrix of the test set", title_style="bold")
    view.add_column("label", justify="right", style="bold")
    for digit in range(10):
        view.add_column(str(digit), justify="right")
    view.add_column("accuracy", justify="right")
    for digit, row in enumerate(table.tolist()):
        cells = [_cell(count, predicted == digit) for predicted, count in enumerate(row)]
        view.add_row(str(digit), *cells, f"{row[digit] / max(1, sum(row)):.1%}")
    Console().print(view)


def _cell(count: int, is_correct: bool) -> str:
    if is_correct:
        return f"[green]{count}[/]"
    return f"[bold red]{count}[/]" if count else "[dim]·[/]"


def save_picture(history: History, table: Tensor, path: Path) -> None:
    """Draw the loss, the accuracy and the confusion matrix side by side, as a PNG file at ``path``."""
    import matplotlib  # slow to import, so it waits until the training is done
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
    positions = [step / steps for step in range(1, len(history.losses) + 1)]
    centers = [epoch + 0.5 for epoch in range(epochs)]
    axes.plot(positions, history.losses, color="#9ecae1", linewidth=0.8, label="step")
    axes.plot(centers, means, color="#08519c", linewidth=2, label="mean of the epoch")
    axes.set(title="Training loss", xlabel="epoch", ylabel="cross entropy", yscale="log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)


def _draw_accuracy(axes: Axes, accuracies: list[float]) -> None:
    percent = [100 * value for value in accuracies]
    axes.axhline(100 * GOAL, color="#bbbbbb", linestyle="--", linewidth=1, label=f"goal: {GOAL:.0%}")
    axes.plot(range(1, len(percent) + 1), percent, color="#238b45", linewidth=2, marker="o", markersize=3.5)
    axes.set(title=f"Test accuracy: {percent[-1]:.1f}%", xlabel="epoch", ylabel="%")
    axes.set_ylim(min(90, *percent) - 1, 100.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="lower right")


def _draw_confusion(axes: Axes, table: Tensor) -> None:
    axes.imshow(table.float().sqrt().tolist(), cmap="Blues")
    for row, column in torch.nonzero(table).tolist():
        color = "white" if row == column else "#cb181d"
        count = str(int(table[row, column]))
        axes.text(column, row, count, ha="center", va="center", color=color, fontsize=8)
    axes.set(
        title="Confusion matrix", xlabel="prediction", ylabel="label", xticks=range(10), yticks=range(10)
    )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
