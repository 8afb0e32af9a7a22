"""A residual network divided into a pipeline of stages, with micro-batches.

    python examples/resnet_pipeline.py
    python examples/resnet_pipeline.py --backend torch    # the same over torch's own RPC

Worker 0 has the images and the loss. Each of the other workers holds one stage of the network. A batch enters
the pipeline in micro-batches: while the second stage works on the first of them, the first stage works on the
second. Worker 0 passes only references (RRefs) from stage to stage; each stage fetches the activations from
the one before. ``backward`` runs through all stages, and a DistributedOptimizer updates each parameter where
it lives.

The same training runs with one, two and four micro-batches. The losses agree, up to rounding, since the
network normalizes each image on its own (group normalization); with batch normalization they would not.
"""

from __future__ import annotations

import argparse
import os
import threading
import time

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

parser = argparse.ArgumentParser(description="A pipeline of stages with micro-batches.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
parser.add_argument("--workers", type=int, default=3, help="one driver and 1 to 4 stages (default: 3)")
parser.add_argument("--steps", type=int, default=8, help="of each training (default: 8)")
OPTIONS = parser.parse_args()
if not 2 <= OPTIONS.workers <= 5:
    parser.error("--workers must be from 2 to 5")

if OPTIONS.backend == "torch":
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc
    from torch.distributed.optim import DistributedOptimizer
else:
    import zmqgrad.autograd as dist_autograd
    from zmqgrad import rpc
    from zmqgrad.optim import DistributedOptimizer

CLASSES = 4
BATCH_SIZE, IMAGE_SIZE = 32, 16
MICRO_BATCHES = (1, 2, 4)


class ResidualBlock(nn.Module):
    """Two convolutions, whose result is added to their input."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def make_layers() -> list[nn.Module]:
    """Return the layers of the whole network. Every worker gets the same weights."""
    torch.manual_seed(0)
    return [
        ResidualBlock(3, 16),
        ResidualBlock(16, 32, stride=2),
        ResidualBlock(32, 32),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)),
    ]


class Stage(nn.Module):
    """Some layers of the network, on the worker where this object lives.

    Args:
        number: of this stage, from 0.
        stages: how many there are.
    """

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        layers = make_layers()
        first, end = len(layers) * number // stages, len(layers) * (number + 1) // stages
        self.layers = nn.Sequential(*layers[first:end])
        self.lock = threading.Lock()  # one micro-batch at a time, so that they leave in order

    def forward(self, activations: rpc.RRef) -> Tensor:
        """Fetch the activations from the stage before, and return the next ones."""
        x = activations.to_here()
        with self.lock:
            return self.layers(x)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return references to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline:
    """The driver's view of the network: a reference to each stage."""

    def __init__(self, workers: list[str]) -> None:
        self.stages = [
            rpc.remote(name, Stage, args=(number, len(workers))) for number, name in enumerate(workers)
        ]

    def __call__(self, images: Tensor, micro_batches: int) -> Tensor:
        """Return the scores of the images, shape (images, classes)."""
        scores = []
        for micro_batch in images.chunk(micro_batches):
            activations = rpc.RRef(micro_batch)
            for stage in self.stages[:-1]:
                activations = stage.remote().forward(activations)
            scores.append(self.stages[-1].rpc_async().forward(activations))
        return torch.cat(torch.futures.wait_all(scores))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return references to all parameters, wherever they live."""
        return [rref for stage in self.stages for rref in stage.rpc_sync().parameter_rrefs()]


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Return images of noisy stripes in four directions, shape (batch, 3, 16, 16), and the directions."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(IMAGE_SIZE), torch.arange(IMAGE_SIZE), indexing="ij")
    stripes = torch.stack([rows, columns, rows + columns, rows - columns]).float().mul(1.5).sin()
    batches = []
    for _ in range(OPTIONS.steps):
        directions = torch.randint(CLASSES, (BATCH_SIZE,), generator=generator)
        noise = torch.randn(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        batches.append((stripes[directions].unsqueeze(1) + 0.5 * noise, directions))
    return batches


def train(workers: list[str], micro_batches: int) -> list[float]:
    """Train a new network. Returns the loss of each step."""
    pipeline = Pipeline(workers)
    optimizer = DistributedOptimizer(torch.optim.Adam, pipeline.parameter_rrefs(), lr=0.01)
    losses = []
    for images, directions in make_batches():
        with dist_autograd.context() as context_id:
            loss = cross_entropy(pipeline(images, micro_batches), directions)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def run_driver(workers: list[str]) -> None:
    """Train with different numbers of micro-batches, and print a table."""
    train(workers, micro_batches=1)  # the first training is slower than the others
    print("micro-batches  first loss  last loss  seconds")
    for micro_batches in MICRO_BATCHES:
        began = time.perf_counter()
        losses = train(workers, micro_batches)
        seconds = time.perf_counter() - began
        print(f"{micro_batches:13}  {losses[0]:10.4f}  {losses[-1]:9.4f}  {seconds:7.2f}", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    """Take part as the driver or as a stage, until the training is done."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    rpc.init_rpc("driver" if rank == 0 else f"stage{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        run_driver(workers=[f"stage{stage}" for stage in range(1, world_size)])
    rpc.shutdown()  # waits for the others; a stage serves calls until then


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(OPTIONS.workers,), nprocs=OPTIONS.workers)
