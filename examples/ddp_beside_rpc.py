"""Data parallel training beside RPC: two trainers share a dense model, a third worker holds the embedding.

    python examples/ddp_beside_rpc.py

The embedding is looked up by RPC, and one backward pass goes from the loss through the dense model to the
embedding. On its way the trainers' gradients are averaged by DistributedDataParallel over gloo, whose process
group meets at the same address as RPC. At the end one process does the same training alone, and the
numbers are compared.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import zmqgrad
import zmqgrad.autograd as dist_autograd
from zmqgrad import rpc
from zmqgrad.optim import DistributedOptimizer

TRAINERS = 2
HOLDER = "holder"
WORDS, TOPICS, WIDTH, BAG = 200, 4, 16, 6
STEPS, BATCH, RATE = 80, 64, 2.0


@functools.cache
def embedding() -> nn.EmbeddingBag:
    """The big table; of the three workers only the holder has it."""
    torch.manual_seed(1)
    return nn.EmbeddingBag(WORDS, WIDTH, mode="mean")


def make_dense() -> nn.Module:
    """What every trainer has a copy of."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, TOPICS))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Bags of words about some topic, but for the first two of each; and the topics."""
    generator = torch.Generator().manual_seed(3)
    topics = torch.randint(TOPICS, (STEPS, BATCH), generator=generator)
    bags = torch.randint(WORDS // TOPICS, (STEPS, BATCH, BAG), generator=generator) * TOPICS
    bags += topics.unsqueeze(2)
    bags[:, :, :2] = torch.randint(WORDS, (STEPS, BATCH, 2), generator=generator)
    return list(zip(bags, topics, strict=True))


def look_up(bags: Tensor) -> Tensor:
    """At the holder: the embedded words."""
    return embedding()(bags)


def table() -> rpc.RRef:
    """At the holder: a reference to the table, for the optimizer."""
    return rpc.RRef(embedding().weight)


def train(rank: int) -> tuple[list[float], nn.Module]:
    """Train as one of the trainers; the losses of whole batches, and the dense model."""
    dense = DistributedDataParallel(make_dense())
    groups = [
        {"params": [rpc.RRef(p) for p in dense.parameters()]},
        # Each trainer's share of a gradient that DDP knows nothing of.
        {"params": [rpc.rpc_sync(HOLDER, table)], "lr": RATE / TRAINERS},
    ]
    optimizer = DistributedOptimizer(optim.SGD, groups, lr=RATE)
    losses = []
    for bags, topics in batches():
        mine = slice(rank * BATCH // TRAINERS, (rank + 1) * BATCH // TRAINERS)
        with dist_autograd.context() as context_id:
            embedded = rpc.rpc_sync(HOLDER, look_up, args=(bags[mine],))
            loss = cross_entropy(dense(embedded), topics[mine])
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        whole = loss.detach() / TRAINERS
        dist.all_reduce(whole)  # and nobody looks anything up before everybody's step is done
        losses.append(whole.item())
    return losses, dense.module


def train_alone() -> tuple[list[float], nn.Module, Tensor]:
    """The same in one process, without any of it."""
    dense = make_dense()
    optimizer = optim.SGD([*dense.parameters(), *embedding().parameters()], lr=RATE)
    losses = []
    for bags, topics in batches():
        loss = cross_entropy(dense(embedding()(bags)), topics)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dense, embedding().weight


def compare(losses: list[float], dense: nn.Module) -> None:
    """Print how well the two trainings agree."""
    table_there = rpc.rpc_sync(HOLDER, table).to_here()
    alone, dense_alone, table_alone = train_alone()
    for step in (0, STEPS // 2, STEPS - 1):
        print(f"step {step:3}: loss {losses[step]:.6f}, by one process {alone[step]:.6f}")
    loss_gap = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    pairs = [*zip(dense.parameters(), dense_alone.parameters(), strict=True), (table_there, table_alone)]
    gap = max((a - b).abs().max().item() for a, b in pairs)
    print(f"largest difference: {loss_gap:.1e} in a loss, {gap:.1e} in a parameter", flush=True)


def run_worker(rank: int) -> None:
    """Ranks 0 and 1 train, and are a process group of their own; the last rank holds the embedding."""
    torch.set_num_threads(1)
    name = f"trainer{rank}" if rank < TRAINERS else HOLDER
    if name == HOLDER:
        embedding()  # before anybody asks
    rpc.init_rpc(name, rank=rank, world_size=TRAINERS + 1)
    if rank < TRAINERS:
        # At MASTER_ADDR and MASTER_PORT, as RPC. dist.init_process_group works there as well.
        zmqgrad.init_process_group("gloo", rank=rank, world_size=TRAINERS)
        losses, dense = train(rank)
        if rank == 0:
            compare(losses, dense)
        dist.destroy_process_group()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, nprocs=TRAINERS + 1)
