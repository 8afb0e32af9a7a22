"""Evaluation of a model by many workers, and a reduction of what they found.

    python examples/map_reduce_evaluation.py
    python examples/map_reduce_evaluation.py --workers 4 --parts 12

A model is evaluated on many points, which are divided into parts. Each worker of a group evaluates one part
and returns a confusion matrix; the sum of the matrices is the result. One worker is slow. So those that are
done before it get the parts that are left, each the worker with the fewest calls. In the end the program
repeats the evaluation in one process and compares. ``map_reduce_evaluation_ray.py`` is the same over Ray.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zmqgrad import rpc

parser = argparse.ArgumentParser(description="Evaluation of a model by many workers.")
parser.add_argument(
    "--workers", type=int, default=8, help="all evaluate; the first one collects (default: 8)"
)
parser.add_argument("--parts", type=int, default=15, help="of the evaluation (default: 15)")
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

POINTS = 20_000  # of a part
CLASSES = 3
SLOW = 1  # rank of a worker that computes everything several times


def make_points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of three clouds that overlap, shape (count, 2), and the cloud of each, shape (count,)."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angles = classes * (2 * torch.pi / CLASSES)
    centers = torch.stack([angles.cos(), angles.sin()], dim=1)
    return centers + 0.6 * torch.randn(count, 2, generator=generator), classes


def train() -> nn.Module:
    """Return a model that has learned the clouds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    points, classes = make_points(500, seed=0)
    for _ in range(50):
        optimizer.zero_grad()
        cross_entropy(model(points), classes).backward()
        optimizer.step()
    return model


@torch.no_grad()
def evaluate(part: int, model: nn.Module) -> tuple[str, Tensor]:
    """Runs on a worker. Returns its name, and the confusion matrix of one part."""
    worker = rpc.get_worker_info()
    for _ in range(20 if worker.id == SLOW else 1):
        matrix = confusion_matrix(model, part)
    return worker.name, matrix


def confusion_matrix(model: nn.Module, part: int) -> Tensor:
    """Return the number of points by their class and by that which the model says, shape (3, 3)."""
    points, classes = make_points(POINTS, seed=1 + part)
    pairs = classes * CLASSES + model(points).argmax(dim=1)
    return torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)


def evaluate_everything(workers: rpc.WorkerGroup, model: nn.Module) -> Tensor:
    """Evaluate all parts with ``workers``, and return the sum of their confusion matrices."""
    options = {"model": model}
    left = list(range(len(workers), OPTIONS.parts))
    evaluating = workers.map_async(evaluate, [(part,) for part in range(len(workers))], options)
    matrix, further, parts_of = torch.zeros(CLASSES, CLASSES, dtype=torch.long), [], Counter[str]()
    for worker, done in evaluating.as_completed():
        if left:
            further.append(workers.choose_async(evaluate, (left.pop(),), options))
        matrix += done.wait()[1]
        parts_of[worker.name] += 1
        print(f"{worker.name} is done; so far, the accuracy is {accuracy(matrix):.2%}", flush=True)
    further += [workers.choose_async(evaluate, (part,), options) for part in left]
    for name, its_matrix in rpc.wait_all(further):
        matrix += its_matrix
        parts_of[name] += 1
    print("parts of each:", ", ".join(f"{name} {count}" for name, count in sorted(parts_of.items())))
    return matrix


def accuracy(matrix: Tensor) -> float:
    """Return the share of points on the diagonal of a confusion matrix."""
    return (matrix.trace() / matrix.sum()).item()


def run_worker(rank: int, world_size: int) -> None:
    """Take part in the evaluation. Worker 0 starts it, and prints its result."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        model = train()
        matrix = evaluate_everything(rpc.group("worker*")[: OPTIONS.parts], model)
        with torch.no_grad():
            expected = sum(confusion_matrix(model, part) for part in range(OPTIONS.parts))
        print(f"accuracy {accuracy(matrix):.2%} on {matrix.sum()} points")
        print("one process counts the same" if matrix.equal(expected) else f"one process counts\n{expected}")
    rpc.shutdown()  # waits for the others; a worker serves calls until then


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(OPTIONS.workers,), nprocs=OPTIONS.workers)
