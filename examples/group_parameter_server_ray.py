"""``group_parameter_server.py`` over Ray, for comparison: the same model, data, steps and result.

    pip install ray torch
    python examples/group_parameter_server_ray.py

Ray has no gradients of calls: each trainer runs its own backward pass and returns its gradients, and the
server averages them.
"""

from __future__ import annotations

import argparse

import ray
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

POINTS = 200  # of each trainer
ARMS = 3
LEARNING_RATE = 0.02


def set_up_torch() -> None:
    """In each process: actors get the class from Ray, and do not run the top of this file."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    torch.set_default_dtype(torch.double)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ARMS))


class Shard:
    """The data of one trainer, as in ``group_parameter_server.py``."""

    def __init__(self, seed: int) -> None:
        set_up_torch()
        generator = torch.Generator().manual_seed(seed)
        self.arms = torch.randint(ARMS, (POINTS,), generator=generator)
        radii = torch.rand(POINTS, generator=generator) + 0.1
        noise = 0.1 * torch.randn(POINTS, generator=generator)
        angles = 4 * radii + self.arms * (2 * torch.pi / ARMS) + noise
        self.points = radii.unsqueeze(1) * torch.stack([angles.cos(), angles.sin()], dim=1)
        self.model = make_model()

    def loss(self, parameters: dict[str, Tensor]) -> Tensor:
        """Return the loss of a model with these parameters."""
        return cross_entropy(functional_call(self.model, parameters, (self.points,)), self.arms)

    def gradients(self, parameters: dict[str, Tensor]) -> tuple[float, list[Tensor]]:
        """Return the loss and its gradients."""
        for parameter in parameters.values():
            parameter.requires_grad_()  # Ray has made a copy for this call
        loss = self.loss(parameters)
        loss.backward()
        return loss.item(), [parameter.grad for parameter in parameters.values()]


def train(shards: list[ray.actor.ActorHandle], steps: int) -> nn.Module:
    """Train a model with the data of all ``shards``, and return it."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, steps + 1):
        shared = ray.put({name: value.detach() for name, value in model.named_parameters()})
        losses, gradients = zip(*ray.get([shard.gradients.remote(shared) for shard in shards]), strict=True)
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(each).mean(dim=0)
        optimizer.step()
        if step == 1 or step % 20 == 0:
            print(f"step {step:3}: mean loss of {len(shards)} trainers {sum(losses) / len(losses):.4f}")
    return model


def train_in_one_process(shards: list[Shard], steps: int) -> nn.Module:
    """Train as :func:`train` does, with torch alone."""
    model = make_model()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([shard.loss(parameters) for shard in shards]).mean().backward()
        optimizer.step()
    return model


def main() -> None:
    """Train with the trainers, and compare the model with that of one process."""
    parser = argparse.ArgumentParser(description="Synchronous training with trainers that are Ray actors.")
    parser.add_argument("--workers", type=int, default=4, help="one server and the trainers (default: 4)")
    parser.add_argument("--steps", type=int, default=100, help="of the training (default: 100)")
    options = parser.parse_args()
    set_up_torch()
    ray.init(num_cpus=options.workers, include_dashboard=False)
    seeds = range(1, options.workers)
    model = train([ray.remote(Shard).remote(seed) for seed in seeds], options.steps)
    expected = train_in_one_process([Shard(seed) for seed in seeds], options.steps)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"largest difference to one process: {difference:.1e}")
    ray.shutdown()


if __name__ == "__main__":
    main()
