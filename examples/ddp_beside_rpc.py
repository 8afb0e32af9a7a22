"""Data parallel training beside RPC.

    python examples/ddp_beside_rpc.py
    python examples/ddp_beside_rpc.py --backend torch    # the same over torch's own RPC

The last worker holds a large embedding. The others are trainers, and each has a copy of the dense model. A
trainer looks up the embedding by RPC. One backward pass runs from its loss through the dense model to the
embedding, and on the way DistributedDataParallel averages the gradients of the trainers over gloo. The
process group of the trainers meets at the same address as RPC. At the end, one process repeats the training
alone, and the results are compared.
"""

from __future__ import annotations

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser(description="Data parallel training beside RPC.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
parser.add_argument(
    "--workers", type=int, default=3, help="the trainers and one for the embedding (default: 3)"
)
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

if OPTIONS.backend == "torch":
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import init_process_group, rpc
    from torch.distributed.optim import DistributedOptimizer
else:
    import zmqgrad.autograd as dist_autograd
    from zmqgrad import init_process_group, rpc
    from zmqgrad.optim import DistributedOptimizer

EMBEDDING_WORKER = "embedding"
WORDS, TOPICS, WIDTH, BAG = 200, 4, 16, 6
STEPS, BATCH, RATE = 80, 64, 2.0


@functools.cache
def embedding() -> nn.EmbeddingBag:
    """Return the embedding. Only its worker calls this during the training."""
    torch.manual_seed(1)
    return nn.EmbeddingBag(WORDS, WIDTH, mode="mean")


def make_dense() -> nn.Module:
    """Return the dense model. All copies begin with the same weights."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, TOPICS))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return bags of words, shape (batch, words of a bag), and their topics, shape (batch,).

    The first two words of a bag are random; the others belong to its topic.
    """
    generator = torch.Generator().manual_seed(3)
    topics = torch.randint(TOPICS, (STEPS, BATCH), generator=generator)
    bags = torch.randint(WORDS // TOPICS, (STEPS, BATCH, BAG), generator=generator) * TOPICS
    bags += topics.unsqueeze(2)
    bags[:, :, :2] = torch.randint(WORDS, (STEPS, BATCH, 2), generator=generator)
    return list(zip(bags, topics, strict=True))


def look_up(bags: Tensor) -> Tensor:
    """Return the embedded bags. Runs on the worker of the embedding."""
    return embedding()(bags)


def table() -> rpc.RRef:
    """Return a reference to the table, for the optimizer. Runs on the worker of the embedding."""
    return rpc.RRef(embedding().weight)


def train(rank: int, trainers: int) -> tuple[list[float], nn.Module]:
    """Run all steps of one trainer. Returns the loss of each whole batch, and the dense model."""
    dense = DistributedDataParallel(make_dense())
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(p) for p in dense.parameters()], lr=RATE)
    # DDP does not average the gradient of the embedding: each trainer updates the table with a share of it.
    table_rref = rpc.rpc_sync(EMBEDDING_WORKER, table)
    table_optimizer = DistributedOptimizer(optim.SGD, [table_rref], lr=RATE / trainers)
    losses = []
    for bags, topics in batches():
        share = slice(rank * BATCH // trainers, (rank + 1) * BATCH // trainers)
        with dist_autograd.context() as context_id:
            embedded = rpc.rpc_sync(EMBEDDING_WORKER, look_up, args=(bags[share],))
            loss = cross_entropy(dense(embedded), topics[share])
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            table_optimizer.step(context_id)
        mean_loss = loss.detach() / trainers
        dist.all_reduce(mean_loss)  # so the next step begins when all trainers have updated the table
        losses.append(mean_loss.item())
    return losses, dense.module


def train_alone() -> tuple[list[float], nn.Module, Tensor]:
    """Do the same in one process, without RPC and without DistributedDataParallel."""
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
    distributed_table = rpc.rpc_sync(EMBEDDING_WORKER, table).to_here()
    alone, dense_alone, table_alone = train_alone()
    for step in (0, STEPS // 2, STEPS - 1):
        print(f"step {step:3}: loss {losses[step]:.6f}, by one process {alone[step]:.6f}")
    loss_gap = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    pairs = [
        *zip(dense.parameters(), dense_alone.parameters(), strict=True),
        (distributed_table, table_alone),
    ]
    gap = max((a - b).abs().max().item() for a, b in pairs)
    print(f"largest difference: {loss_gap:.1e} in a loss, {gap:.1e} in a parameter", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    """Take part as a trainer or, with the last rank, as the worker that holds the embedding."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    trainers = world_size - 1
    is_trainer = rank < trainers
    if not is_trainer:
        embedding()  # the calls run in several threads; they find it made
    rpc.init_rpc(f"trainer{rank}" if is_trainer else EMBEDDING_WORKER, rank=rank, world_size=world_size)
    if is_trainer:
        # Meets at MASTER_ADDR and MASTER_PORT, as RPC does. dist.init_process_group works there as well.
        init_process_group("gloo", rank=rank, world_size=trainers)
        losses, dense = train(rank, trainers)
        if rank == 0:
            compare(losses, dense)
        dist.destroy_process_group()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(OPTIONS.workers,), nprocs=OPTIONS.workers)
