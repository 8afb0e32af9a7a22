"""Kills workers and agents of a training job at random: no step beyond the last whole commit may be lost.

    python -m tools.state_kills --kills 200

Three nodes on this host train and commit each step; some values are replicated, others sharded. A worker, or
an agent with its workers (what the loss of a host is to the others), gets SIGKILL; a node that was killed is
started again. Each restore must be at the last step that was whole before the kill, or later, the same on all
ranks, and the weights at the end must be equal to those of a run without kills.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.elastic.agent.nodes import Job, Node
from zmqgrad.store import TCPStore

NODES = 3
SEEN = re.compile(r"^(?:\[worker \d+\] )?(whole|restored|end|worker)\b(.*)$", re.MULTILINE)

TRAIN = """
import time
import torch
import zmqgrad.elastic as elastic
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters())
rows = torch.zeros(840).tensor_split(size)[rank]
state = elastic.State(model=model, optimizer=optimizer, step=0, rows=elastic.Sharded(rows))
state.restore()
print("restored", os.environ["ZMQGRAD_ROUND"], rank, state.step, flush=True)
end = {end}
while not os.path.exists(end) or state.step < int(open(end).read()):
    optimizer.zero_grad()
    model(torch.full((1, 4), float(state.step % 7))).square().sum().backward()
    optimizer.step()
    state.rows += torch.arange(840.).tensor_split(size)[rank] * (state.step % 3)
    state.step += 1
    state.commit()
    state.wait()
    if rank == 0:
        print("whole", state.step, flush=True)
    time.sleep(0.01)
print("end", rank, size, state.step, repr(model.weight.tolist()), repr(state.rows.sum().item()), flush=True)
sys.exit()
"""


def expected(steps: int) -> tuple[str, float]:
    """The weights, and the sum of all rows, without kills."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.zeros(840)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 4), float(step % 7))).square().sum().backward()
        optimizer.step()
        rows += torch.arange(840.0) * (step % 3)
    return repr(model.weight.tolist()), float(rows.sum())


class Watch:
    """What all nodes have printed."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.gone: list[Node] = []

    def found(self, kind: str) -> list[list[str]]:
        """The words of all lines of one kind."""
        texts = [node.text for node in [*self.gone, *self.nodes]]
        return [m[2].split() for text in texts for m in SEEN.finditer(text) if m[1] == kind]

    def whole(self) -> int:
        """The newest step that was whole."""
        return max((int(words[0]) for words in self.found("whole")), default=0)

    def wait(self, ready: object, seconds: float = 180.0) -> None:
        """Wait for ``ready``."""
        deadline = time.monotonic() + seconds
        while not ready():  # type: ignore[operator]
            if time.monotonic() > deadline:
                texts = "\n----\n".join(node.text[-3000:] for node in self.nodes)
                raise SystemExit(f"training does not go on:\n{texts}")
            time.sleep(0.05)


def main() -> None:
    """Run it, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1e9, help="end sooner, after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    until = time.monotonic() + options.seconds
    with (
        tempfile.TemporaryDirectory() as directory,
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store,
    ):
        job, watch, end = (
            Job(f"127.0.0.1:{store.port}", Path(directory) / "w.py"),
            Watch(),
            Path(directory) / "end",
        )
        counts = {"worker": 0, "agent": 0}
        lost = 0

        def start() -> Node:
            return job.start(
                TRAIN.replace("{end}", repr(str(end))), nodes=f"{NODES - 1}:{NODES}", restarts=10_000
            )

        def start_node() -> None:
            watch.nodes.append(start())

        try:
            for _ in range(NODES):
                start_node()
            watch.wait(lambda: watch.whole() >= 3)
            while sum(counts.values()) < options.kills and time.monotonic() < until:
                victim = draw.randrange(NODES)
                node, kind = watch.nodes[victim], draw.choice(("worker", "agent"))
                time.sleep(draw.random())
                rounds = {int(words[0]) for words in watch.found("restored")}
                before = watch.whole()
                if kind == "agent":
                    node.process.kill()
                    watch.gone.append(watch.nodes.pop(victim))
                    start_node()
                else:
                    pids = [int(m) for m in re.findall(r"worker (\d+) has", node.text, re.MULTILINE)]
                    if not pids:
                        continue
                    try:
                        signal.pidfd_send_signal(_pidfd(pids[-1]), signal.SIGKILL)
                    except ProcessLookupError:
                        continue  # it has ended meanwhile
                counts[kind] += 1
                # Some round has gone on since.
                watch.wait(lambda before=before: watch.whole() > before + 1)
                restored = [list(map(int, words)) for words in watch.found("restored")]
                for number in {words[0] for words in restored} - rounds:
                    steps = {words[2] for words in restored if words[0] == number}
                    lost = max(lost, before - min(steps))
                    assert len(steps) == 1, f"round {number} restored {steps}"
                print(
                    f"{sum(counts.values())} kills {counts}, step {watch.whole()}, lost at most {lost}",
                    flush=True,
                )
            last = watch.whole() + 200
            end.write_text(str(last))
            for node in watch.nodes:
                assert node.wait() == 0, node.text[-3000:]
            ends = [
                words for words in (line.split(None, 3) for line in _ends(watch)) if int(words[2]) == last
            ]
            weights, total = expected(last)
            assert ends
            assert all(line[3].startswith(weights) for line in ends), (ends, weights)
            sums = {int(line[0]): float(line[3].rpartition(" ")[2]) for line in ends}
            assert abs(sum(sums.values()) - total) <= 1e-5 * total, (sums, total)
        finally:
            job.close()
    print(f"kills: {counts}; steps lost: {lost}; steps: {last}; the weights are equal to those without kills")
    sys.exit(lost > 0)


def _ends(watch: Watch) -> list[str]:
    return [
        m[1]
        for node in watch.nodes
        for m in re.finditer(r"^(?:\[worker \d+\] )?end (.*)$", node.text, re.MULTILINE)
    ]


def _pidfd(pid: int) -> int:
    return os.pidfd_open(pid)


if __name__ == "__main__":
    main()
