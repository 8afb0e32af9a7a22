"""Synchronous training with a parameter server that calls all trainers at once.

    python examples/group_parameter_server.py
    python examples/group_parameter_server.py --workers 5

Worker 0 owns the model. Each of the other workers is a trainer with data of its own. In every step the server
calls the whole group with its parameters, each trainer returns the loss of its data, and one backward pass
through all of these calls sums the gradients of the parameters: data parallelism in five lines. The program
then repeats the training in one process and prints the largest difference. ``group_parameter_server_ray.py``
is the same over Ray.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from zmqgrad import rpc
from zmqgrad.autograd import backward, context
from zmqgrad.optim import DistributedOptimizer

parser = argparse.ArgumentParser(description="Synchronous training with a group of trainers.")
parser.add_argument("--workers", type=int, default=4, help="one server and the trainers (default: 4)")
parser.add_argument("--steps", type=int, default=100, help="of the training (default: 100)")
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

POINTS = 200  # of each trainer
ARMS = 3
LEARNING_RATE = 0.02
torch.set_default_dtype(torch.double)  # the order of sums makes no visible difference


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ARMS))


class Shard:
    """The data of one trainer: points on three spiral arms.

    Args:
        seed: determines the points.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.arms = torch.randint(ARMS, (POINTS,), generator=generator)
        radii = torch.rand(POINTS, generator=generator) + 0.1
        noise = 0.1 * torch.randn(POINTS, generator=generator)
        angles = 4 * radii + self.arms * (2 * torch.pi / ARMS) + noise
        self.points = radii.unsqueeze(1) * torch.stack([angles.cos(), angles.sin()], dim=1)
        self.model = make_model()  # its structure; its parameters are those of each call

    def loss(self, parameters: dict[str, Tensor]) -> Tensor:
        """Return the loss of a model with these parameters."""
        return cross_entropy(functional_call(self.model, parameters, (self.points,)), self.arms)


def make_shard() -> Shard:
    """Runs on each trainer: its rank determines its data."""
    return Shard(seed=rpc.get_worker_info().id)


def train(shards: rpc.RRefGroup[Shard]) -> nn.Module:
    """Train a model with the data of all ``shards``, and return it."""
    model = make_model()
    parameters = dict(model.named_parameters())
    references = [rpc.RRef(parameter) for parameter in parameters.values()]
    optimizer = DistributedOptimizer(torch.optim.Adam, references, lr=LEARNING_RATE)
    for step in range(1, OPTIONS.steps + 1):
        with context() as context_id:
            losses = shards.rpc_sync().loss(parameters)
            loss = torch.stack(losses).mean()
            backward(context_id, [loss])
            optimizer.step(context_id)
        if step == 1 or step % 20 == 0:
            print(f"step {step:3}: mean loss of {len(shards)} trainers {loss.item():.4f}", flush=True)
    return model


def train_in_one_process(shards: list[Shard]) -> nn.Module:
    """Train as :func:`train` does, with torch alone."""
    model = make_model()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(OPTIONS.steps):
        optimizer.zero_grad()
        torch.stack([shard.loss(parameters) for shard in shards]).mean().backward()
        optimizer.step()
    return model


def run_server(trainers: rpc.WorkerGroup) -> None:
    """Train with the trainers, and compare the model with that of one process."""
    model = train(trainers.remote(make_shard))
    expected = train_in_one_process([Shard(seed=trainer.id) for trainer in trainers])
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"largest difference to one process: {difference:.1e}", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    """Take part as the server or as a trainer, until the training is done."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        run_server(rpc.group("trainer*"))
    rpc.shutdown()  # waits for the others; a trainer serves calls until then


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(OPTIONS.workers,), nprocs=OPTIONS.workers)
