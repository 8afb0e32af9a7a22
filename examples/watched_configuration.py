"""A learning rate that changes while a job runs: the trainers read it from a store in each step.

    python examples/watched_configuration.py
    python examples/watched_configuration.py --backend torch    # over torch's store, which has no watches

Worker 0 serves the store. It lowers the key "lr" each time that all trainers have completed some epochs, as
an operator would do by ``zmqgrad store set lr 0.05``, and ends the training by the value 0. The other
workers train a network each on a share of scikit-learn's digits. ``get_cached`` returns the learning rate
from the memory of the trainer, where a watch keeps it up to date; torch's ``get`` asks the server in each
step. The table shows how soon the trainers used a new value, and what a look-up costs. watched.png shows the
learning rate and the loss of each step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description="A learning rate that changes while a job runs.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose store to use")
parser.add_argument("--workers", type=int, default=3, help="one server and the trainers (default: 3)")
parser.add_argument("--epochs", type=int, default=5, help="with each learning rate (default: 5)")
parser.add_argument("--out", type=Path, default=Path("runs/watched"), help="(default: runs/watched)")
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

if OPTIONS.backend == "torch":
    from torch.distributed import TCPStore
else:
    from zmqgrad.store import TCPStore

RATES = (0.5, 0.05, 0.005)
BATCH_SIZE = 16


class Step(NamedTuple):
    """One step of a trainer. ``time``: when it ended, by the monotonic clock of the host."""

    time: float
    rate: float
    loss: float
    look_up_seconds: float


def load_share(rank: int, trainers: int) -> tuple[Tensor, Tensor]:
    """Return the images (n, 64) and labels (n,) of one trainer."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    share = slice(rank - 1, None, trainers)
    return torch.as_tensor(images[share], dtype=torch.float32) / 16, torch.as_tensor(labels[share])


def train(store: TCPStore, rank: int) -> None:
    """Train until the learning rate is 0, and report each epoch in the store."""
    images, labels = load_share(rank, OPTIONS.workers - 1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0])
    look_up: Callable[[str], bytes] = store.get if OPTIONS.backend == "torch" else store.get_cached
    steps: list[Step] = []
    epochs: Counter[float] = Counter()
    while True:
        for batch in torch.randperm(len(images)).split(BATCH_SIZE):
            began = time.perf_counter()
            rate = float(look_up("lr"))
            look_up_seconds = time.perf_counter() - began
            if not rate:
                store.set(f"report/trainer{rank}", json.dumps(steps))
                return
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            steps.append(Step(time.monotonic(), rate, loss.item(), look_up_seconds))
        epochs[rate] += 1
        store.set(f"epoch/{rate}/{epochs[rate]}/trainer{rank}", "done")


def serve(store: TCPStore) -> None:
    """Lower the learning rate while the trainers run, and print what they did."""
    from rich.progress import Progress

    trainers = [f"trainer{rank}" for rank in range(1, OPTIONS.workers)]
    changes = []
    with Progress() as progress:
        task = progress.add_task("epochs", total=len(RATES) * OPTIONS.epochs)
        for rate in RATES:
            changes.append(time.monotonic())
            store.set("lr", str(rate))
            for epoch in range(1, OPTIONS.epochs + 1):
                store.wait([f"epoch/{rate}/{epoch}/{name}" for name in trainers], timedelta(seconds=120))
                progress.advance(task)
    store.set("lr", "0")
    reports = {name: [Step(*step) for step in json.loads(store.get(f"report/{name}"))] for name in trainers}
    print_table(reports, changes)
    save_picture(reports, OPTIONS.out / "watched.png")
    print(f"picture: {OPTIONS.out / 'watched.png'}", flush=True)


def print_table(reports: dict[str, list[Step]], changes: list[float]) -> None:
    """Print for each trainer and learning rate: how soon it was used, the steps, and the mean loss."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{OPTIONS.backend}: what the trainers did")
    for column in ("trainer", "learning rate", "used after", "steps", "mean loss", "a look-up"):
        table.add_column(column, justify="right")
    for name, steps in reports.items():
        for rate, changed in zip(RATES, changes, strict=True):
            chosen = [step for step in steps if step.rate == rate]
            delay = "-" if rate == RATES[0] else f"{1e3 * (chosen[0].time - changed):.1f} ms"
            loss = statistics.mean(step.loss for step in chosen)
            look_up = f"{1e6 * statistics.median(step.look_up_seconds for step in chosen):.1f} us"
            table.add_row(name, str(rate), delay, str(len(chosen)), f"{loss:.3f}", look_up)
    Console().print(table)


def save_picture(reports: dict[str, list[Step]], path: Path) -> None:
    """Draw the learning rate and the loss of each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    start = min(steps[0].time for steps in reports.values())
    for name, steps in reports.items():
        times, rates, losses, _ = zip(*steps, strict=True)
        seconds = [at - start for at in times]
        upper.plot(seconds, rates, drawstyle="steps-post", label=name)
        lower.plot(seconds, losses, linewidth=0.7, alpha=0.8)
    upper.set(ylabel="learning rate", yscale="log")
    upper.legend(frameon=False)
    lower.set(xlabel="seconds", ylabel="loss", yscale="log")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def run_worker(rank: int, port: int) -> None:
    """Serve the store, or train."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    store = TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        store.set("lr", str(RATES[0]))
        serve(store)
    else:
        train(store, rank)
    if OPTIONS.backend == "zmqgrad":
        store.close()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(int(os.environ.get("MASTER_PORT", "29500")),), nprocs=OPTIONS.workers)
