"""Elastic training: workers and hosts die and return while a network learns to read digits.

    zmqgrad run --nnodes 1:3 --nproc-per-node 2 --max-restarts 10 examples/elastic_digits.py
    python examples/elastic_digits.py --demo

The first command runs on every host, with the same ``--rdzv-endpoint``. DistributedDataParallel averages the
gradients of all workers. After each epoch, rank 0 replaces the checkpoint; after a failure, or when a host
joins, the launcher starts all workers again, and they continue with the last checkpoint. An epoch that was
interrupted is repeated by the new group.

``--demo`` starts three agents on this host, kills a worker and then a whole host (an agent with its workers),
and starts that agent again. elastic.png shows the loss over time, coloured by world size, with the kills.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

LAUNCHER = ("-m", "zmqgrad", "run")

BATCH, RATE = 64, 0.1
"""Images of a step over all workers, so that the world size does not change the training."""

WORKERS = 1
"""Of each agent of the demo."""

STEP_SECONDS = 90.0
"""The demo waits this long for each event."""


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Elastic training on scikit-learn's digits.")
    parser.add_argument("--demo", action="store_true", help="start agents here, and kill some of them")
    parser.add_argument("--agents", type=int, default=3, help="of the demo (default: 3)")
    parser.add_argument("--epochs", type=int, default=40, help="(default: 40)")
    parser.add_argument("--epoch-seconds", type=float, default=0.0, help="least duration of an epoch")
    parser.add_argument("--out", type=Path, default=Path("runs/elastic"), help="(default: runs/elastic)")
    return parser.parse_args()


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (n, 64) and labels (n,): a training set, and a fifth that is held out."""
    from sklearn import datasets  # the demo itself does not need it

    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(images, dtype=torch.float32)[order] / 16
    y = torch.as_tensor(labels, dtype=torch.long)[order]
    held_out = len(x) // 5
    return x[held_out:], y[held_out:], x[:held_out], y[:held_out]


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file so that it is either the old or the new one, whenever this process is killed."""
    new = path.with_suffix(f".{os.getpid()}")
    write(new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(new, path)


def train(out: Path, epochs: int, epoch_seconds: float) -> None:
    """Run one worker until all epochs are done. The launcher starts it again in each round."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load_digits()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    first, checkpoint = 0, out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    dist.barrier()  # rank 0 must not replace the checkpoint before all have read it
    record(out, {"event": "round", "epoch": first, "size": size, "pid": os.getpid()})
    for epoch in range(first, epochs):
        began = time.monotonic()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        losses = torch.zeros(2)
        for step in order.split(BATCH):
            loss = step_of(model, optimizer, images, labels, step, rank, size)
            losses += torch.tensor([loss, 1.0])
        dist.all_reduce(losses)
        if rank == 0:
            right = (model.module(test_images).argmax(1) == test_labels).float().mean().item()
            mean = (losses[0] / losses[1]).item()
            record(out, {"event": "epoch", "epoch": epoch, "loss": mean, "accuracy": right, "size": size})
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            replace(checkpoint, lambda path, state=state: torch.save(state, path))
        time.sleep(max(0.0, began + epoch_seconds - time.monotonic()))  # a longer training, for the demo
    dist.barrier()
    dist.destroy_process_group()


def step_of(
    model: nn.Module,
    optimizer: optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    step: Tensor,
    rank: int,
    size: int,
) -> float:
    """Train on this worker's share of the images of ``step``. Returns their mean loss."""
    share = step[rank::size]
    if not len(share):
        share = step[:1]  # a worker without images would leave the others waiting
    optimizer.zero_grad()
    loss = cross_entropy(model(images[share]), labels[share])
    loss.backward()
    optimizer.step()
    return loss.item()


def record(out: Path, event: dict[str, Any]) -> None:
    """Append a line to the log, which all processes share. Short lines are written at once."""
    line = json.dumps({"time": time.time(), **event}) + "\n"
    with (out / "log.jsonl").open("a") as file:
        file.write(line)


def read_log(out: Path) -> list[dict[str, Any]]:
    """Return all events, by time."""
    path = out / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((json.loads(line) for line in lines), key=lambda event: event["time"])


class Demo:
    """Agents on this host, and what happens to them."""

    def __init__(self, out: Path, agents: int, epochs: int, epoch_seconds: float) -> None:
        self.out = out
        self._workers = agents * WORKERS
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        # The store is served apart from the agents, so that each of them can be killed.
        self._store = self._start("-m", "zmqgrad", "store", "serve", "--port", str(port))
        self._command = [
            *(*LAUNCHER, f"--nnodes=1:{agents}", f"--nproc-per-node={WORKERS}", "--max-restarts=10"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=digits"),
            "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,is_host=false",
            *(__file__, "--out", str(out), "--epochs", str(epochs), "--epoch-seconds", str(epoch_seconds)),
        ]
        self.agents = [self._start(*self._command) for _ in range(agents)]

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.out / "output.txt").open("ab") as output:
            return subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output)

    def start_agent(self, number: int) -> None:
        """Start an agent again."""
        self.agents[number] = self._start(*self._command)
        record(self.out, {"event": "start", "what": "host returns"})

    def kill(self, what: str, pid: int) -> None:
        """Kill a process without warning."""
        record(self.out, {"event": "kill", "what": what})
        os.kill(pid, signal.SIGKILL)

    def wait_for(self, what: str, reached: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Wait until the log has ``reached`` something. Returns the events."""
        deadline = time.monotonic() + STEP_SECONDS
        while not reached(events := read_log(self.out)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {STEP_SECONDS:g} s; see {self.out / 'output.txt'}")
            time.sleep(0.05)
        print(what, flush=True)
        return events

    def wait_for_epochs(self, size: int, after: float) -> list[dict[str, Any]]:
        """Wait for three epochs of a round of ``size`` workers that began after that time."""

        def reached(events: list[dict[str, Any]]) -> bool:
            began = [
                e["time"] for e in events if e["event"] == "round" and e["time"] > after and e["size"] == size
            ]
            return (
                sum(e["event"] == "epoch" and e["time"] > min(began, default=e["time"]) for e in events) >= 3
            )

        return self.wait_for(f"three epochs by {size} workers", reached)

    def run(self) -> None:
        """Let things happen, one after another, and wait for the end of the training."""
        events = self.wait_for_epochs(self._workers, 0.0)
        self.kill("worker killed", [e["pid"] for e in events if e["event"] == "round"][-1])
        self.wait_for_epochs(self._workers, time.time())
        self.kill("host killed", self.agents[-1].pid)  # its workers die with it
        self.wait_for_epochs(self._workers - WORKERS, time.time())
        self.agents[-1].wait()
        now = time.time()
        self.start_agent(-1)
        self.wait_for_epochs(self._workers, now)
        codes = [agent.wait(STEP_SECONDS) for agent in self.agents]
        if any(codes):
            raise RuntimeError(f"the agents ended with {codes}; see {self.out / 'output.txt'}")

    def end(self) -> None:
        """End all processes."""
        for process in [*self.agents, self._store]:
            process.terminate()
        for process in [*self.agents, self._store]:
            process.wait()


def draw(events: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss over time, with rounds, kills and starts."""
    from matplotlib.figure import Figure

    start = events[0]["time"]
    epochs = [event for event in events if event["event"] == "epoch"]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([e["time"] - start for e in epochs], [e["loss"] for e in epochs], color="#bbbbbb", zorder=1)
    for size, colour in zip(
        sorted({e["size"] for e in epochs}), ("#d95f0e", "#08519c", "#238b45"), strict=False
    ):
        chosen = [e for e in epochs if e["size"] == size]
        times, losses = [e["time"] - start for e in chosen], [e["loss"] for e in chosen]
        axes.scatter(times, losses, s=22, color=colour, label=f"{size} workers", zorder=2)
    axes.set_yscale("log")
    for event in events:
        if event["event"] in ("kill", "start"):
            colour = "#cb181d" if event["event"] == "kill" else "#238b45"
            axes.axvline(event["time"] - start, color=colour, linestyle="--", linewidth=1)
            axes.text(
                event["time"] - start, 1.01, event["what"], color=colour, ha="center",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    axes.set(xlabel="seconds", ylabel="training loss, mean of an epoch")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title=f"held out: {epochs[-1]['accuracy']:.1%} right", title_fontsize=10)
    figure.savefig(path, dpi=120)


def demo(options: argparse.Namespace) -> None:
    """Run the demo, print what happened, and draw it."""
    out = Path(tempfile.mkdtemp(dir=options.out))
    running = Demo(out, options.agents, options.epochs, options.epoch_seconds or 0.5)
    try:
        running.run()
    finally:
        running.end()
    events = read_log(out)
    epochs = [event for event in events if event["event"] == "epoch"]
    print("world sizes:", *dict.fromkeys(e["size"] for e in epochs))
    print(f"held out: {epochs[-1]['accuracy']:.1%} right after {epochs[-1]['epoch'] + 1} epochs")
    draw(events, options.out / "elastic.png")
    print("saved", options.out / "elastic.png")


if __name__ == "__main__":
    OPTIONS = parse()
    OPTIONS.out.mkdir(parents=True, exist_ok=True)
    if OPTIONS.demo:
        demo(OPTIONS)
    else:
        train(OPTIONS.out, OPTIONS.epochs, OPTIONS.epoch_seconds)
