"""A model spread over several processes learns to read handwritten digits.

    zmqgrad run --nproc-per-node 3 examples/digits_pipeline.py
    zmqgrad run --nproc-per-node 3 examples/digits_pipeline.py --backend torch    # over torch's own RPC

Worker 0 drives: it has the images and the loss. The layers live on the other workers, one stage on each.
A batch goes to the first stage in micro-batches, so that the stages work at the same time; activations go
from stage to stage directly, as each hands on a reference (RRef) and not a value. One call of backward
runs through all processes, and a DistributedOptimizer then updates each parameter where it lives.
"""
# ruff: noqa: E402  (the clock starts before the heavy imports, and an option chooses one of them)

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

STARTED = time.monotonic()
HOW_TO_START = "zmqgrad run --nproc-per-node 3 examples/digits_pipeline.py"
HOW_TO_INSTALL = 'pip install -c constraints.txt -e ".[examples]"'


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: 20)")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step (default: 64)")
    parser.add_argument("--micro-batches", type=int, default=2, help="parts of a batch (default: 2)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="where the picture goes")
    options = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "micro_batches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


OPTIONS = parse_options(None if __name__ == "__main__" else [])

import torch
from torch import Tensor, nn

# All that differs between zmqgrad and torch:
if OPTIONS.backend == "torch":
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc
    from torch.distributed.optim import DistributedOptimizer
else:
    import zmqgrad.autograd as dist_autograd
    from zmqgrad import rpc
    from zmqgrad.optim import DistributedOptimizer

from digits_report import History, accuracy, confusion, print_table, save_picture

# --- The model: four blocks, dealt out to the stages in order.

BLOCKS = 4


def make_block(index: int, seed: int) -> nn.Module:
    """One block of the model. Its first weights depend on the seed alone, not on who holds it."""
    torch.manual_seed(1000 * seed + index)
    match index:
        case 0:
            return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        case 1:
            return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        case 2:
            return nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU())
        case _:
            return nn.Linear(64, 10)


def deal(blocks: int, stages: int) -> list[range]:
    """Which blocks each stage gets: as evenly as can be, in order."""
    bounds = [blocks * stage // stages for stage in range(stages + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


class Stage(nn.Module):
    """Some blocks of the model, on the worker where this object lives."""

    def __init__(self, blocks: range, seed: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(make_block(index, seed) for index in blocks))

    def forward(self, activations: Any) -> Tensor:
        """Fetch the activations from the owner of the RRef, and compute the next ones."""
        result: Tensor = self.blocks(activations.to_here())
        return result

    def parameter_rrefs(self) -> list[Any]:
        """References to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline:
    """The driver's view of the model: a reference to each stage."""

    def __init__(self, stages: int, seed: int) -> None:
        self.stages = [
            rpc.remote(f"stage{number}", Stage, args=(blocks, seed))
            for number, blocks in enumerate(deal(BLOCKS, stages), start=1)
        ]

    def __call__(self, images: Tensor, micro_batches: int = 1) -> Tensor:
        """The outputs for ``images``, computed in ``micro_batches`` parts that follow each other closely."""
        return torch.cat(torch.futures.wait_all([self._send(part) for part in images.chunk(micro_batches)]))

    def _send(self, images: Tensor) -> torch.futures.Future[Tensor]:
        *others, last = self.stages
        activations = rpc.RRef(images)
        for stage in others:
            activations = stage.remote().forward(activations)
        future: torch.futures.Future[Tensor] = last.rpc_async().forward(activations)
        return future

    def parameter_rrefs(self) -> list[Any]:
        """References to all parameters, wherever they live."""
        return [rref for stage in self.stages for rref in stage.rpc_sync().parameter_rrefs()]


# --- The data: 1797 scanned digits of 8 x 8 pixels, a fifth of them held out.


class Digits(NamedTuple):
    """Images (count, 1, 8, 8) from 0 to 1, and labels (count,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int) -> Digits:
    """The digits that come with scikit-learn, shuffled and split."""
    from sklearn.datasets import load_digits as load  # takes a second, and only the driver needs it

    bunch = load()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(labels) // 5], order[len(labels) // 5 :]
    return Digits(images[train], labels[train], images[test], labels[test])


# --- Training, as the driver does it.


def train_step(model: Pipeline, optimizer: Any, images: Tensor, labels: Tensor, micro_batches: int) -> float:
    """Forward, backward and update over all workers; the loss."""
    with dist_autograd.context() as context:
        loss = nn.functional.cross_entropy(model(images, micro_batches), labels)
        dist_autograd.backward(context, [loss])
        optimizer.step(context)
    return loss.item()


@torch.no_grad()
def predict(model: Pipeline, images: Tensor) -> Tensor:
    """The digit that the model sees in each image."""
    return model(images).argmax(dim=1)


def train(model: Pipeline, digits: Digits, options: argparse.Namespace) -> History:
    """All epochs, with a progress bar, or a line for each epoch where there is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    began = time.monotonic()
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(options.seed)
    count = len(digits.train_labels)
    steps = -(-count // options.batch_size)
    losses: list[float] = []
    accuracies: list[float] = []
    bar = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}"))
    with Progress(*bar, TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=options.epochs * steps)
        for epoch in range(1, options.epochs + 1):
            for batch in torch.randperm(count, generator=generator).split(options.batch_size):
                images, labels = digits.train_images[batch], digits.train_labels[batch]
                losses.append(train_step(model, optimizer, images, labels, options.micro_batches))
                if len(losses) == 1:
                    progress.console.print(f"first step {time.monotonic() - STARTED:.1f} s after the start")
                progress.advance(task)
            accuracies.append(accuracy(predict(model, digits.test_images), digits.test_labels))
            news = f"loss {sum(losses[-steps:]) / steps:.4f}, held out {accuracies[-1]:.1%}"
            progress.update(task, description=news)
            if not progress.console.is_terminal:
                progress.console.print(f"epoch {epoch:2} of {options.epochs}: {news}")
    return History(losses, accuracies, time.monotonic() - began)


def drive(digits: Digits, stages: int, options: argparse.Namespace) -> None:
    """What worker 0 does once all are there."""
    model = Pipeline(stages, options.seed)
    history = train(model, digits, options)

    predictions = predict(model, digits.test_images)
    table = confusion(predictions, digits.test_labels)
    print_table(table)
    seen = options.epochs * len(digits.train_labels)
    print(
        f"held out: {accuracy(predictions, digits.test_labels):.2%} right, last loss {history.losses[-1]:.6f}"
    )
    print(
        f"{options.backend}: {options.epochs} epochs in {history.seconds:.2f} s,"
        f" {seen / history.seconds:.0f} images/s"
    )
    picture = options.out / "training.png"
    save_picture(history, table, picture)
    print(f"picture: {picture}")


# --- Start and end, on each worker.


def main() -> None:
    """Join the others; worker 0 drives, and the stages serve until it is done."""
    rank, world_size = place_in_the_group()
    if rank == 0:
        require("rich", "sklearn", "matplotlib")
        digits = load_digits(OPTIONS.seed)
        rpc.init_rpc("driver", rank=rank, world_size=world_size)
        drive(digits, world_size - 1, OPTIONS)
    else:
        rpc.init_rpc(f"stage{rank}", rank=rank, world_size=world_size)
    rpc.shutdown()


def place_in_the_group() -> tuple[int, int]:
    """This worker's rank and how many there are, as the launcher says."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        sys.exit(f"RANK and WORLD_SIZE are not set. Start this script with\n    {HOW_TO_START}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not 2 <= world_size <= BLOCKS + 1:
        sys.exit(
            f"This takes one worker to drive and 1 to {BLOCKS} to hold the layers, not {world_size} in all."
            f" Start it with\n    {HOW_TO_START}"
        )
    return rank, world_size


def require(*modules: str) -> None:
    """End with the remedy if some of ``modules`` are not installed."""
    from importlib.util import find_spec

    if missing := [module for module in modules if find_spec(module) is None]:
        sys.exit(f"{', '.join(missing)} missing. Install the extra 'examples':\n    {HOW_TO_INSTALL}")


if __name__ == "__main__":
    main()
