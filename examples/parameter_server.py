"""Asynchronous training with a parameter server.

    python examples/parameter_server.py
    python examples/parameter_server.py --backend torch    # the same over torch's own RPC

Worker 0 owns the model. Each of the other workers is a trainer with data of its own: it calls the model,
differentiates its loss through the call, and steps the parameters where they are. The trainers do not wait
for each other. So one of them steps while another is between its forward and its backward pass: with torch
the latter fails, as the values that it needs have been overwritten. With ``versions=True`` a step gives the
parameters new memory instead, and each gradient is exact for the values that its forward pass has seen.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description="Asynchronous training with a parameter server.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
parser.add_argument("--workers", type=int, default=3, help="one server and the trainers (default: 3)")
parser.add_argument("--steps", type=int, default=150, help="of each trainer (default: 150)")
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

if OPTIONS.backend == "torch":
    from torch.distributed import rpc
    from torch.distributed.autograd import backward, context
    from torch.distributed.optim import DistributedOptimizer

    SHARED = {}  # torch has nothing of the kind
else:
    from zmqgrad import rpc
    from zmqgrad.autograd import backward, context
    from zmqgrad.optim import DistributedOptimizer

    SHARED = {"versions": True, "max_staleness": 20}

BATCH_SIZE = 64
ARMS = 3


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, ARMS))


def make_spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points on three spiral arms, shape (count, 2), and the arm of each point, shape (count,)."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randint(ARMS, (count,), generator=generator)
    radii = torch.rand(count, generator=generator) + 0.1
    angles = 4 * radii + arms * (2 * torch.pi / ARMS) + 0.1 * torch.randn(count, generator=generator)
    return radii.unsqueeze(1) * torch.stack([angles.cos(), angles.sin()], dim=1), arms


class ParameterServer:
    """Owns the model. The trainers call its methods; the calls run in several threads."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = make_model()

    def parameters(self) -> list[rpc.RRef]:
        """Return references to the parameters."""
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def classify(self, points: Tensor) -> Tensor:
        """Return the output of the model, shape (count, arms)."""
        return self.model(points)


def train(server: rpc.RRef, rank: int) -> tuple[list[float], int, int]:
    """Run all steps of one trainer, on that trainer.

    Args:
        server: reference to the :class:`ParameterServer`.
        rank: of the trainer; it determines the data.

    Returns:
        The loss of each step, the number of steps that failed, and the largest staleness of a gradient: how
        many steps of others it did not see.
    """
    parameters = server.rpc_sync().parameters()
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.005, **SHARED)
    points, arms = make_spirals(BATCH_SIZE * OPTIONS.steps, seed=rank)
    losses, failed, stalest = [], 0, 0
    for batch_points, batch_arms in zip(points.split(BATCH_SIZE), arms.split(BATCH_SIZE), strict=True):
        try:
            with context() as context_id:
                loss = cross_entropy(server.rpc_sync().classify(batch_points), batch_arms)
                backward(context_id, [loss])
                result = optimizer.step(context_id)
        except RuntimeError:  # "modified by an inplace operation": over torch only
            failed += 1
            continue
        losses.append(loss.item())
        if result is not None:
            stalest = max(stalest, result.staleness)
    return losses, failed, stalest


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the share of new points that the model assigns to the right arm."""
    points, arms = make_spirals(1000, seed=0)
    return (model(points).argmax(dim=1) == arms).float().mean().item()


def run_server(trainers: int) -> None:
    """Start all trainers, wait for them, and print what they report."""
    server = ParameterServer()
    print(f"accuracy before training: {accuracy(server.model):.1%}")
    server_rref = rpc.RRef(server)
    futures = [
        rpc.rpc_async(f"trainer{rank}", train, args=(server_rref, rank)) for rank in range(1, trainers + 1)
    ]
    for rank, (losses, failed, stalest) in enumerate(torch.futures.wait_all(futures), start=1):
        print(f"trainer {rank}: loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
        print(f"           {failed} of {OPTIONS.steps} steps failed; staleness at most {stalest}")
    print(f"accuracy after training: {accuracy(server.model):.1%}", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    """Take part as the server or as a trainer, until all are done."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        run_server(trainers=world_size - 1)
    rpc.shutdown()  # waits for the others; a trainer serves calls until then


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(OPTIONS.workers,), nprocs=OPTIONS.workers)
