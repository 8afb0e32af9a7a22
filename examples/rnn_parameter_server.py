"""A recurrent network whose large layers live on parameter servers.

    python examples/rnn_parameter_server.py
    python examples/rnn_parameter_server.py --backend torch    # the same over torch's own RPC

Worker 0 trains a language model of characters. It holds only the LSTM. The other workers are parameter
servers: each holds a slice of the embedding (some of its columns) and a slice of the decoder (the scores of
some characters). In a real model these are the layers that fit no single machine.

The forward pass calls the servers, one call of ``backward`` runs through all processes, and a
DistributedOptimizer updates each parameter where it lives. The text to learn is this one: the docstring of
the program.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description="A recurrent network with parameter servers.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
parser.add_argument("--workers", type=int, default=3, help="one trainer and the servers (default: 3)")
parser.add_argument("--steps", type=int, default=60, help="of training (default: 60)")
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

if OPTIONS.backend == "torch":
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc
    from torch.distributed.optim import DistributedOptimizer
else:
    import zmqgrad.autograd as dist_autograd
    from zmqgrad import rpc
    from zmqgrad.optim import DistributedOptimizer

EMBEDDING_SIZE, HIDDEN_SIZE = 48, 64
BATCH_SIZE, SEQUENCE_LENGTH = 16, 24

TEXT = __doc__ or ""
CHARACTERS = sorted(set(TEXT))


def slice_sizes(total: int, slices: int) -> list[int]:
    """Divide ``total`` as evenly as possible."""
    return [total * (i + 1) // slices - total * i // slices for i in range(slices)]


class EmbeddingSlice(nn.Module):
    """Some columns of the embedding, on a parameter server."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.table = nn.Embedding(len(CHARACTERS), columns)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the embedded characters, shape (sequence, batch, columns)."""
        return self.table(characters)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return references to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class DecoderSlice(nn.Module):
    """The scores of some characters, on a parameter server."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN_SIZE, characters)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return scores, shape (sequence, batch, characters)."""
        return self.linear(hidden)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return references to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class LanguageModel(nn.Module):
    """The trainer's view of the model: an LSTM, and references to the slices on the servers.

    Args:
        servers: names of the workers that hold the slices.
    """

    def __init__(self, servers: list[str]) -> None:
        super().__init__()
        columns = slice_sizes(EMBEDDING_SIZE, len(servers))
        characters = slice_sizes(len(CHARACTERS), len(servers))
        self.embedding = [
            rpc.remote(name, EmbeddingSlice, args=(n,)) for name, n in zip(servers, columns, strict=True)
        ]
        self.decoder = [
            rpc.remote(name, DecoderSlice, args=(n,)) for name, n in zip(servers, characters, strict=True)
        ]
        self.lstm = nn.LSTM(EMBEDDING_SIZE, HIDDEN_SIZE)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the scores of the next characters.

        Args:
            characters: shape (sequence, batch).

        Returns:
            Shape (sequence, batch, number of characters).
        """
        # The servers work at the same time.
        embedded = [part.rpc_async().forward(characters) for part in self.embedding]
        hidden, _ = self.lstm(torch.cat(torch.futures.wait_all(embedded), dim=2))
        scores = [part.rpc_async().forward(hidden) for part in self.decoder]
        return torch.cat(torch.futures.wait_all(scores), dim=2)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return references to all parameters, wherever they live."""
        rrefs = [rpc.RRef(parameter) for parameter in self.parameters()]  # of the LSTM
        for part in self.embedding + self.decoder:
            rrefs += part.rpc_sync().parameter_rrefs()
        return rrefs


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Return random pieces of the text, shape (sequence, batch), and the characters that follow."""
    text = torch.tensor([CHARACTERS.index(character) for character in TEXT])
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(SEQUENCE_LENGTH).unsqueeze(1)
    batches = []
    for _ in range(OPTIONS.steps):
        starts = torch.randint(len(text) - SEQUENCE_LENGTH, (BATCH_SIZE,), generator=generator)
        batches.append((text[starts + offsets], text[starts + offsets + 1]))
    return batches


def train(servers: list[str]) -> None:
    """Train the model, and print the loss now and then."""
    torch.manual_seed(0)
    model = LanguageModel(servers)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=0.02)
    for step, (characters, targets) in enumerate(make_batches(), start=1):
        with dist_autograd.context() as context_id:
            scores = model(characters)
            loss = cross_entropy(scores.flatten(0, 1), targets.flatten())
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        if step == 1 or step % 15 == 0:
            print(f"step {step:3}: loss {loss:.4f}, perplexity {loss.exp():.1f}", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    """Take part as the trainer or as a parameter server, until the training is done."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    torch.manual_seed(rank)
    rpc.init_rpc("trainer" if rank == 0 else f"server{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        train(servers=[f"server{server}" for server in range(1, world_size)])
    rpc.shutdown()  # waits for the others; a server serves calls until then


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(OPTIONS.workers,), nprocs=OPTIONS.workers)
