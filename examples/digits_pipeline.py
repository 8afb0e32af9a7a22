"""Pipeline parallelism: a network whose layers live on several workers learns to classify handwritten digits.

    zmqgrad run --nproc-per-node 3 examples/digits_pipeline.py
    zmqgrad run --nproc-per-node 3 examples/digits_pipeline.py --backend torch    # over torch's own RPC

Worker 0 is the driver: it has the images and computes the loss. Each other worker is a stage: it holds some
of the layers. The driver splits a batch into micro-batches, so that the stages work at the same time. It
passes references (RRefs) to the stages instead of values: each stage fetches its input directly from the
stage before it.

One call of ``backward`` runs through all processes, and a DistributedOptimizer updates each parameter where
it lives. The model and its first weights do not depend on the number of stages, so the losses do not either.
"""
# ruff: noqa: E402  (STARTED is set before the slow imports, and --backend selects some of them)

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
HOW_TO_INSTALL = (
    'pip install "zmqgrad[examples]"'  # in a clone: pip install -c constraints.txt -e ".[examples]"
)


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: 20)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step (default: 64)")
    parser.add_argument("--micro-batches", type=int, default=2, help="per batch (default: 2)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/digits"), help="folder for the picture (default: runs/digits)"
    )
    options = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "micro_batches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


OPTIONS = parse_options(None if __name__ == "__main__" else [])

import torch
from torch import Tensor, nn

# Only the imports differ between zmqgrad and torch.
if OPTIONS.backend == "torch":
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc
    from torch.distributed.optim import DistributedOptimizer
else:
    import zmqgrad.autograd as dist_autograd
    from zmqgrad import rpc
    from zmqgrad.optim import DistributedOptimizer

from digits_report import History, accuracy, confusion, print_table, save_picture

# --- The model: four blocks of layers, which the stages share in order.

BLOCKS = 4


def make_block(index: int, seed: int) -> nn.Module:
    """Return one block of the model. Its first weights depend only on the seed and the index."""
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


def split_blocks(blocks: int, stages: int) -> list[range]:
    """Return the indices of the blocks of each stage, as even in number as possible."""
    bounds = [blocks * stage // stages for stage in range(stages + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


class Stage(nn.Module):
    """One stage of the pipeline: consecutive blocks of the model, on one worker."""

    def __init__(self, blocks: range, seed: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(make_block(index, seed) for index in blocks))

    def forward(self, activations: Any) -> Tensor:
        """Apply the blocks to the value of an RRef, fetched from its owner."""
        result: Tensor = self.blocks(activations.to_here())
        return result

    def parameter_rrefs(self) -> list[Any]:
        """Return references to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline:
    """The driver's view of the model: references to the stages."""

    def __init__(self, stages: int, seed: int) -> None:
        self.stages = [
            rpc.remote(f"stage{number}", Stage, args=(blocks, seed))
            for number, blocks in enumerate(split_blocks(BLOCKS, stages), start=1)
        ]

    def __call__(self, images: Tensor, micro_batches: int = 1) -> Tensor:
        """Return the scores of the digits, shape (count, 10), computed in ``micro_batches`` parts."""
        return torch.cat(torch.futures.wait_all([self._start(part) for part in images.chunk(micro_batches)]))

    def _start(self, images: Tensor) -> torch.futures.Future[Tensor]:
        """Start one micro-batch. No call here waits: each stage waits for the stage before it."""
        *others, last = self.stages
        activations = rpc.RRef(images)
        for stage in others:
            activations = stage.remote().forward(activations)
        future: torch.futures.Future[Tensor] = last.rpc_async().forward(activations)
        return future

    def parameter_rrefs(self) -> list[Any]:
        """Return references to all parameters, wherever they live."""
        return [rref for stage in self.stages for rref in stage.rpc_sync().parameter_rrefs()]


# --- The data: 1797 scanned digits of 8 x 8 pixels. A fifth of them is the test set.


class Digits(NamedTuple):
    """Images with values from 0 to 1, shape (count, 1, 8, 8), and labels, shape (count,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int) -> Digits:
    """Load the digits of scikit-learn, shuffle them, and split off the test set."""
    from sklearn.datasets import load_digits as load  # slow to import, and only the driver needs it

    bunch = load()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(labels) // 5], order[len(labels) // 5 :]
    return Digits(images[train], labels[train], images[test], labels[test])


# --- Training, on the driver.


def train_step(model: Pipeline, optimizer: Any, images: Tensor, labels: Tensor, micro_batches: int) -> float:
    """Run the forward pass, the backward pass and the optimizer on all workers. Return the loss."""
    with dist_autograd.context() as context_id:
        loss = nn.functional.cross_entropy(model(images, micro_batches), labels)
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.item()


@torch.no_grad()
def predict(model: Pipeline, images: Tensor) -> Tensor:
    """Return the most probable digit for each image."""
    return model(images).argmax(dim=1)


def train(model: Pipeline, digits: Digits, options: argparse.Namespace) -> History:
    """Train for all epochs. Show a progress bar on a terminal, and otherwise print a line per epoch."""
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
                    progress.console.print(
                        f"first step done after {time.monotonic() - STARTED:.1f} s, imports included"
                    )
                progress.advance(task)
            accuracies.append(accuracy(predict(model, digits.test_images), digits.test_labels))
            status = f"loss {sum(losses[-steps:]) / steps:.4f}, test accuracy {accuracies[-1]:.1%}"
            progress.update(task, description=status)
            if not progress.console.is_terminal:
                progress.console.print(f"epoch {epoch:2} of {options.epochs}: {status}")
    return History(losses, accuracies, time.monotonic() - began)


def run_driver(digits: Digits, stages: int, options: argparse.Namespace) -> None:
    """Train the model, and report the results."""
    model = Pipeline(stages, options.seed)
    history = train(model, digits, options)

    predictions = predict(model, digits.test_images)
    table = confusion(predictions, digits.test_labels)
    print_table(table)
    images = options.epochs * len(digits.train_labels)
    print(f"test accuracy: {history.accuracies[-1]:.2%}, last loss {history.losses[-1]:.6f}")
    print(
        f"{options.backend}: {options.epochs} epochs in {history.seconds:.2f} s,"
        f" {images / history.seconds:.0f} images/s"
    )
    picture = options.out / "training.png"
    save_picture(history, table, picture)
    print(f"picture: {picture}")


# --- The program of each worker.


def main() -> None:
    """Run the driver or a stage."""
    rank, world_size = rank_and_world_size()
    if rank == 0:
        require("rich", "sklearn", "matplotlib")
        digits = load_digits(OPTIONS.seed)
        rpc.init_rpc("driver", rank=rank, world_size=world_size)
        run_driver(digits, world_size - 1, OPTIONS)
    else:
        rpc.init_rpc(f"stage{rank}", rank=rank, world_size=world_size)
    rpc.shutdown()  # waits for the others; a stage serves calls until then


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this worker and the number of workers, which the launcher sets."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        sys.exit(f"RANK and WORLD_SIZE are not set. Start this script with\n    {HOW_TO_START}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not 2 <= world_size <= BLOCKS + 1:
        sys.exit(
            f"WORLD_SIZE is {world_size}, but this program needs one driver and 1 to {BLOCKS} stages."
            f" Start it with\n    {HOW_TO_START}"
        )
    return rank, world_size


def require(*modules: str) -> None:
    """Exit with a message if any of ``modules`` is not installed."""
    from importlib.util import find_spec

    if missing := [module for module in modules if find_spec(module) is None]:
        sys.exit(f"{', '.join(missing)} missing. Install the extra 'examples':\n    {HOW_TO_INSTALL}")


if __name__ == "__main__":
    main()
