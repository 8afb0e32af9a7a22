"""A parameter server that waits for all trainers and then updates the model once.

    python examples/batch_parameter_server.py
    python examples/batch_parameter_server.py --backend torch    # the same over torch's own RPC

Worker 0 owns the model, the others train it. A trainer sends its gradients and gets the updated model back,
by one call. The server can only reply when the gradients of all trainers have arrived. It therefore returns a
future: with ``@rpc.functions.async_execution`` the reply is sent when the future is done, and no thread waits
for it.

The gradients are averaged, so this computes the same as one process with the batches of all trainers.
"""

from __future__ import annotations

import argparse
import os
import threading

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser(description="Synchronous training with a parameter server.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
parser.add_argument("--workers", type=int, default=3, help="one server and the trainers (default: 3)")
parser.add_argument("--steps", type=int, default=200, help="updates of the model (default: 200)")
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

if OPTIONS.backend == "torch":
    from torch.distributed import rpc
else:
    from zmqgrad import rpc

BATCH_SIZE = 64
INPUTS = 16


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 128), nn.Tanh(), nn.Linear(128, 1))


class ParameterServer:
    """Owns the model and its optimizer.

    Args:
        trainers: how many send gradients for each update.
    """

    def __init__(self, trainers: int) -> None:
        self.model = make_model(seed=0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.trainers = trainers
        self.lock = threading.Lock()  # guards the gradients and what follows
        self.received = 0
        self.updated_parameters: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        """Return a copy of the parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @staticmethod
    @rpc.functions.async_execution
    def push(server: rpc.RRef, gradients: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the parameters after the next update.

        Args:
            server: reference to the server, on the server itself.
            gradients: of one trainer's batch.
        """
        self = server.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                share = gradient / self.trainers
                parameter.grad = share if parameter.grad is None else parameter.grad + share
            self.received += 1
            future = self.updated_parameters
            if self.received < self.trainers:
                return future
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.received = 0
            self.updated_parameters = torch.futures.Future()
            parameters = self.parameters()
        future.set_result(parameters)  # replies to all trainers
        return future


def make_data(seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and the function to learn: what another network computes, which nobody else knows."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(BATCH_SIZE * OPTIONS.steps, INPUTS, generator=generator)
    with torch.no_grad():
        return inputs, 3 * make_model(seed=1000)(inputs)


def train(server: rpc.RRef, rank: int) -> list[float]:
    """Run all steps of one trainer, on that trainer. Returns the loss of each step."""
    model = make_model(seed=0)
    inputs, targets = make_data(seed=rank)
    losses = []
    for batch_inputs, batch_targets in zip(inputs.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True):
        loss = mse_loss(model(batch_inputs), batch_targets)
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        updated = rpc.rpc_sync(server.owner(), ParameterServer.push, args=(server, gradients))
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), updated, strict=True):
                parameter.copy_(value)
        losses.append(loss.item())
    return losses


def run_server(trainers: int) -> None:
    """Start all trainers, wait for them, and print the mean of their losses."""
    server = rpc.RRef(ParameterServer(trainers))
    futures = [rpc.rpc_async(f"trainer{rank}", train, args=(server, rank)) for rank in range(1, trainers + 1)]
    losses = torch.tensor(torch.futures.wait_all(futures)).mean(dim=0)
    for step in range(0, OPTIONS.steps, max(1, OPTIONS.steps // 5)):
        print(f"step {step:4}: loss {losses[step]:.4f}")
    print(f"step {OPTIONS.steps - 1:4}: loss {losses[-1]:.4f}", flush=True)


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
