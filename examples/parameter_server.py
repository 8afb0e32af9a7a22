"""Asynchronous training with a parameter server.

    python examples/parameter_server.py
    python examples/parameter_server.py --backend torch    # the same over torch's own RPC

Worker 0 owns the model. Each of the other workers is a trainer with data of its own: it pulls the parameters,
computes gradients with them, and pushes the gradients back, which updates the model. Both are calls of
methods on the server's object, through a remote reference (RRef). The trainers do not wait for each other.
"""

from __future__ import annotations

import argparse
import os
import threading

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description="Asynchronous training with a parameter server.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
parser.add_argument("--workers", type=int, default=3, help="one server and the trainers (default: 3)")
parser.add_argument("--steps", type=int, default=150, help="of each trainer (default: 150)")
OPTIONS = parser.parse_args()

if OPTIONS.backend == "torch":
    from torch.distributed import rpc
else:
    from zmqgrad import rpc

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
    """Owns the model and its optimizer.

    The trainers call its methods. The calls run in several threads, so a lock guards the model.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.lock = threading.Lock()

    def pull(self) -> list[Tensor]:
        """Return a copy of the parameters."""
        with self.lock:
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def push(self, gradients: list[Tensor]) -> None:
        """Update the model with the gradients of one batch."""
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()


def train(server: rpc.RRef, rank: int) -> list[float]:
    """Run all steps of one trainer, on that trainer.

    Args:
        server: reference to the :class:`ParameterServer`.
        rank: of the trainer; it determines the data.

    Returns:
        The loss of each step.
    """
    model = make_model()
    points, arms = make_spirals(BATCH_SIZE * OPTIONS.steps, seed=rank)
    losses = []
    for batch_points, batch_arms in zip(points.split(BATCH_SIZE), arms.split(BATCH_SIZE), strict=True):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), server.rpc_sync().pull(), strict=True):
                parameter.copy_(value)
        loss = cross_entropy(model(batch_points), batch_arms)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        server.rpc_sync().push(list(gradients))
        losses.append(loss.item())
    return losses


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
    for rank, losses in enumerate(torch.futures.wait_all(futures), start=1):
        print(f"trainer {rank}: loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
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
