"""Kills workers and agents of a training job at random: no step beyond the last whole commit may be lost.

    python -m tools.state_kills --kills 200

Three nodes on this host train and commit each step; some values are replicated, others sharded. A worker, or
an agent with its workers (what the loss of a host is to the others), gets SIGKILL; a node that was killed is
started again. Each restore must be at the newest step that was whole in a round before, or later, and the
same on all ranks; and each value that is restored, or reached at the end, must be as without kills.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.elastic.agent.committing import CommittingJob, WithoutKills, say, start
from tests.elastic.agent.nodes import Node
from zmqgrad.store import TCPStore

NODES = 3

WAIT_SECONDS = 180.0

STEPS_AT_THE_END = 200

LINE = re.compile(r"^(?:restored (\d+)|end) (\[(\d+),(\d+),(\d+),.*\])\n", re.MULTILINE)

WHOLE = struct.Struct("<II")


def train(whole: Path, end: Path) -> None:
    """What the workers do, until the step in the file ``end``. Whole steps go to the file ``whole``."""
    training = start()
    state = training.state
    record = os.open(whole, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while not end.exists() or state.step < int(end.read_text()):
        training.train()
        state.commit()
        state.wait()
        if training.rank == 0:
            os.write(record, WHOLE.pack(int(os.environ["ZMQGRAD_ROUND"]), state.step))
        time.sleep(0.01)
    say("end", training.values())


class Fault(Exception):
    """What must not be."""


class Watch:
    """What the nodes have written."""

    def __init__(self, whole: Path) -> None:
        whole.touch()
        self._file = whole.open("rb")
        self._without_kills = WithoutKills()
        self._read: dict[Node, int] = {}
        self.nodes: list[Node] = []
        self.killed: list[Node] = []
        self.newest: Counter[int] = Counter()  # by round: the newest whole step
        self.restored: dict[int, int] = {}  # by round: the step
        self.ends: list[tuple[int, ...]] = []  # rank, size and step

    def look(self) -> int:
        """Take in what is new, and check it. Returns the newest whole step."""
        for node in self.nodes:
            text = node.text
            for match in LINE.finditer(text, self._read.get(node, 0)):
                self._read[node] = match.end()
                rank, size, step = (int(match[group]) for group in (3, 4, 5))
                if match[2] != self._without_kills.values(step, rank, size):
                    raise Fault(f"unequal values: {match[0]}")
                if match[1] is None:
                    self.ends.append((rank, size, step))
                elif self.restored.setdefault(int(match[1]), step) != step:
                    raise Fault(f"round {match[1]} restores step {step} and {self.restored[int(match[1])]}")
        for round, step in WHOLE.iter_unpack(self._file.read()):
            self.newest[round] = max(self.newest[round], step)
        for round, step in self.restored.items():
            before = max((self.newest[each] for each in self.newest if each < round), default=0)
            if step < before:
                raise Fault(f"round {round} restores step {step}, though step {before} was whole before")
        return max(self.newest.values(), default=0)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait for ``ready``."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not ready():
            if time.monotonic() > deadline:
                raise Fault("training does not go on")
            time.sleep(0.02)

    def kill(self, node: Node, kind: str) -> bool:
        """Kill the agent ``node``, or its worker. Returns False if it has none now."""
        if kind == "agent":
            node.close()
            self.look()  # before it is forgotten
            self.nodes.remove(node)
            self.killed.append(node)
            return True
        pids = re.findall(r"^worker (\d+) has", node.text, re.MULTILINE)
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if pids:
                worker = os.pidfd_open(int(pids[-1]))
                try:
                    status = Path(f"/proc/{pids[-1]}/status").read_text()
                    if f"\nPPid:\t{node.process.pid}\n" in status:  # else the number belongs to another now
                        signal.pidfd_send_signal(worker, signal.SIGKILL)
                        return True
                finally:
                    os.close(worker)
        return False


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
        tempfile.TemporaryDirectory() as name,
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store,
    ):
        directory = Path(name)
        end = directory / "end"
        job, watch = CommittingJob(f"127.0.0.1:{store.port}", directory), Watch(directory / "whole")
        kills: Counter[str] = Counter()
        try:
            while sum(kills.values()) < options.kills and time.monotonic() < until:
                while len(watch.nodes) < NODES:
                    watch.nodes.append(
                        job.start(train, directory / "whole", end, nodes=(NODES - 1, NODES), restarts=10_000)
                    )
                before = watch.look()
                watch.wait(lambda before=before: watch.look() > before + 1)  # type: ignore[misc]
                time.sleep(draw.random())
                kind = draw.choice(("worker", "agent"))
                if watch.kill(draw.choice(watch.nodes), kind):
                    kills[kind] += 1
                    print(f"kills: {dict(kills)}; step {watch.look()}", flush=True)
            last = watch.look() + STEPS_AT_THE_END
            end.write_text(str(last))
            for node in watch.nodes:
                if node.wait() != 0:
                    raise Fault("a node has not ended with success")
            watch.look()
            if not watch.ends or any(step != last for _, _, step in watch.ends):
                raise Fault(f"not all have reached step {last}: {watch.ends}")
        except Fault as fault:
            texts = "\n----\n".join(node.text[-3000:] for node in [*watch.killed[-2:], *watch.nodes])
            raise SystemExit(f"{fault}:\n{texts}") from None
        finally:
            job.close()
    print(f"kills: {dict(kills)}; steps: {last}; rounds: {len(watch.restored)}; steps lost: 0;")
    print("all values are as without kills")


if __name__ == "__main__":
    main()
