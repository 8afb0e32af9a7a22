"""``map_reduce_evaluation.py`` over Ray, for comparison: the same model, points and result.

    pip install ray torch
    python examples/map_reduce_evaluation_ray.py

Ray's ``ActorPool`` gives each actor its next part when it is done with one.
"""

from __future__ import annotations

import argparse
from collections import Counter

import ray
import torch
from ray.util import ActorPool
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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


class Evaluator:
    """An actor. It gets a number, as Ray has no ranks."""

    def __init__(self, number: int, model: nn.Module) -> None:
        torch.set_num_threads(1)  # the actors share the cores of one machine
        self.number, self.model = number, model

    @torch.no_grad()
    def evaluate(self, part: int) -> tuple[str, Tensor]:
        """Return the name of this actor, and the confusion matrix of one part."""
        for _ in range(20 if self.number == SLOW else 1):
            matrix = confusion_matrix(self.model, part)
        return f"actor{self.number}", matrix


def confusion_matrix(model: nn.Module, part: int) -> Tensor:
    """Return the number of points by their class and by that which the model says, shape (3, 3)."""
    points, classes = make_points(POINTS, seed=1 + part)
    pairs = classes * CLASSES + model(points).argmax(dim=1)
    return torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)


def evaluate_everything(pool: ActorPool, parts: int) -> Tensor:
    """Evaluate all parts with the actors, and return the sum of their confusion matrices."""
    matrix, parts_of = torch.zeros(CLASSES, CLASSES, dtype=torch.long), Counter[str]()
    for name, its_matrix in pool.map_unordered(lambda actor, part: actor.evaluate.remote(part), range(parts)):
        matrix += its_matrix
        parts_of[name] += 1
        print(f"{name} is done; so far, the accuracy is {accuracy(matrix):.2%}", flush=True)
    print("parts of each:", ", ".join(f"{name} {count}" for name, count in sorted(parts_of.items())))
    return matrix


def accuracy(matrix: Tensor) -> float:
    """Return the share of points on the diagonal of a confusion matrix."""
    return (matrix.trace() / matrix.sum()).item()


def main() -> None:
    """Evaluate with actors, and compare with one process."""
    parser = argparse.ArgumentParser(description="Evaluation of a model by many Ray actors.")
    parser.add_argument("--workers", type=int, default=8, help="actors that evaluate (default: 8)")
    parser.add_argument("--parts", type=int, default=15, help="of the evaluation (default: 15)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(num_cpus=options.workers, include_dashboard=False)
    model = train()
    shared = ray.put(model)
    actors = [ray.remote(Evaluator).remote(number, shared) for number in range(options.workers)]
    matrix = evaluate_everything(ActorPool(actors), options.parts)
    with torch.no_grad():
        expected = sum(confusion_matrix(model, part) for part in range(options.parts))
    print(f"accuracy {accuracy(matrix):.2%} on {matrix.sum()} points")
    print("one process counts the same" if matrix.equal(expected) else f"one process counts\n{expected}")
    ray.shutdown()


if __name__ == "__main__":
    main()
