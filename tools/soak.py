"""A job under faults for as long as wanted: exact results, and no growth of what the process holds.

    python -m tools.soak --minutes 60
    python -m tools.soak oracles --seconds 100     # loops the scenarios that are compared with torch

This process is the member ``hub`` of a group without a fixed size. It calls two others, keeps RRefs on them,
runs backward passes over both, and watches a store, while they are killed, stopped, or leave, and others
join. The report is runs/soak/report.md, with a plot beside it. Connections are not cut here: tools.faults
does that.

``oracles`` runs the scenarios of tests/oracles, once on torch, and then again and again in one group here. A
wake-up that is lost once in a thousand rounds shows itself as a group that hangs, with the number of the
round and all stacks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tools.ports import free_port
from zmqgrad import autograd, rpc
from zmqgrad.errors import RpcError
from zmqgrad.store import Store, TCPStore

OUT = Path("runs/soak")
MEMBERS = 2
JOIN_SECONDS = 120.0
FAULT_SECONDS = 8.0
STOP_SECONDS = 1.0
TOLERANCE = 0.05
"""Growth over the second half of the run that counts as flat, as a share of the mean; the first warms up."""

SLACK = {"memory MB": 8.0, "descriptors": 6.0, "threads": 4.0, "segments": 2.0}
"""Growth that counts as flat in any case: what a loss that has just happened still holds."""

ROUND_SECONDS = 40.0
"""How long the last round of scenarios may take."""

OPTIONS = rpc.RpcBackendOptions(rpc_timeout=60.0, liveness_timeout=0.5)
_left = threading.Event()


def leave() -> None:
    """Called on a member: it leaves the group."""
    _left.set()


def double(x: torch.Tensor) -> torch.Tensor:
    """Called on a member."""
    return x * 2


def member(name: str) -> None:
    """The main function of a member."""
    rpc.init_rpc(name, rank=None, rpc_backend_options=OPTIONS)
    _left.wait()
    rpc.shutdown()


class Members:
    """Two members; each that ends is replaced by another."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ = environ
        self._number = 0
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def fill(self) -> None:
        """Start as many as are missing, and wait until they have joined."""
        new = []
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
        while len(self.running) < MEMBERS:
            self._number += 1
            name = f"member{self._number}"
            command = [sys.executable, "-m", "tools.soak", "--member", name]
            self.running[name] = subprocess.Popen(command, env=self._environ)
            new.append(name)
        if new:
            rpc.wait_for_workers(new, timeout=JOIN_SECONDS)

    def strike(self, rng: random.Random) -> str:
        """A random fault at a random member. Returns its name."""
        name, process = rng.choice(list(self.running.items()))
        fault = rng.choice(["kill", "stop", "leave"])
        if fault == "kill":
            process.kill()
            process.wait()
        elif fault == "leave":
            rpc.rpc_sync(name, leave)
            process.wait(JOIN_SECONDS)
        else:
            process.send_signal(signal.SIGSTOP)
            threading.Timer(STOP_SECONDS, process.send_signal, (signal.SIGCONT,)).start()
        return fault

    def close(self) -> None:
        """End all."""
        for process in self.running.values():
            process.kill()
            process.wait()


def step(members: list[str], store: Store, rng: random.Random, number: int) -> str:
    """One operation, whose result is checked. Returns its name."""
    to = rng.choice(members)
    x = torch.full((rng.choice([4, 300_000]),), float(number % 1000))
    kind = rng.choice(["call", "rref", "backward", "watch"])
    if kind == "call":
        _expect(torch.equal(rpc.rpc_sync(to, double, (x,)), x * 2), kind)
    elif kind == "rref":
        _expect(torch.equal(rpc.remote(to, double, (x,)).to_here(), x * 2), kind)
    elif kind == "watch":
        with store.watch("key", timeout=30.0) as changes:
            store.set("key", str(number))
            _expect(next(changes).new == str(number).encode(), kind)
    else:
        leaf = torch.ones(4, requires_grad=True)
        with autograd.context() as context:
            y = leaf
            for each in members:
                y = rpc.rpc_sync(each, double, (y,))
            autograd.backward(context, [y.sum()])
            expected = torch.full((4,), 2.0 ** len(members))
            _expect(torch.equal(autograd.get_gradients(context)[leaf], expected), kind)
    return kind


def _expect(holds: bool, kind: str) -> None:
    if not holds:
        raise AssertionError(f"a wrong result of {kind}")


def usage() -> dict[str, float]:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text()
    return {
        "memory MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "segments": maps.count("memfd:zmqgrad"),
    }


def growth(times: list[float], values: list[float]) -> tuple[float, float]:
    """Growth of ``values`` over the second half, by linear regression, and their mean there."""
    half = len(times) // 2
    t, v = torch.tensor(times[half:], dtype=torch.float64), torch.tensor(values[half:], dtype=torch.float64)
    centred = t - t.mean()
    slope = (centred * (v - v.mean())).sum() / (centred**2).sum().clamp(min=1e-9)
    return float(slope * (t[-1] - t[0])), float(v.mean())


def soak(seconds: float, seed: int) -> int:
    """Runs it. Returns 1 if something grew."""
    os.environ.pop("WORLD_SIZE", None)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    rng, done, faults = random.Random(seed), Counter[str](), Counter[str]()
    times: list[float] = []
    seen: dict[str, list[float]] = {name: [] for name in SLACK}
    rpc.init_rpc("hub", rank=0, rpc_backend_options=OPTIONS)
    members = Members(dict(os.environ))
    with contextlib.ExitStack() as stack:
        stack.callback(rpc.shutdown, graceful=False)
        stack.callback(members.close)
        store = stack.enter_context(TCPStore("127.0.0.1", 0, is_master=True))
        members.fill()
        began = time.monotonic()
        next_fault = next_sample = 0.0
        while (now := time.monotonic() - began) < seconds:
            if now >= next_sample:
                next_sample = now + max(0.5, seconds / 1000)
                times.append(now)
                for name, value in usage().items():
                    seen[name].append(value)
            if now >= next_fault + FAULT_SECONDS:
                next_fault = now
                faults[members.strike(rng)] += 1
                members.fill()
                print(f"{now:6.0f} s  {sum(done.values())} operations {dict(faults)}", flush=True)
            try:
                done[step(list(members.running), store, rng, sum(done.values()))] += 1
            except RpcError as e:
                done[f"failed: {type(e).__name__}"] += 1
    return report(times, seen, done, faults)


def report(times: list[float], seen: dict[str, list[float]], done: Counter[str], faults: Counter[str]) -> int:
    """Writes the report and the plot. Returns 1 if something grew."""
    lines = [f"# Soak of {times[-1]:.0f} s", "", f"operations: {dict(done)}; faults: {dict(faults)}", ""]
    lines += ["| what | mean | growth in the second half | limit | |", "|---|---|---|---|---|"]
    grew = False
    for name, values in seen.items():
        by, mean = growth(times, values)
        limit = max(TOLERANCE * mean, SLACK[name])
        grew |= by > limit
        lines.append(
            f"| {name} | {mean:.1f} | {by:+.2f} | {limit:.2f} | {'GREW' if by > limit else 'flat'} |"
        )
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    _plot(times, seen)
    return int(grew)


def _plot(times: list[float], seen: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(len(seen), 1, sharex=True), seen.items(), strict=True):
        axes.plot(times, values)
        axes.set_ylabel(name)
    axes.set_xlabel("seconds")
    figure.savefig(OUT / "usage.png", dpi=100)


def loop_oracles(seconds: float, family: str) -> int:
    """Runs the scenarios of ``family`` on torch, and here again and again. Returns 1 if one hangs or differs.

    Args:
        seconds: how long.
        family: a module of tests/oracles.
    """
    test: Any = importlib.import_module("tests.oracles.test_oracles")
    scenario: Any = importlib.import_module("tests.oracles.scenario")

    def run(name: str, seconds: float) -> dict[str, object]:
        limit, environ = seconds + ROUND_SECONDS, {test.VARIABLE: name}
        found: list[dict[str, object]] = test.run_processes(
            scenario.run_family, scenario.WORKERS, (family, seconds), limit, environ
        )
        return found[0]

    try:
        theirs, ours = run("torch", 0.0), run("zmqgrad", seconds)
    except AssertionError as e:  # with the stacks of all processes, if one hangs
        print(e, flush=True)
        return 1
    same = [name for each, name in test.SAME if each == family]
    differing = {name: found for name in same if (found := test.compare(theirs[name], ours[name]))}
    print(f"{family}: {len(same)} scenarios, {differing or 'as on torch'}", flush=True)
    return int(bool(differing))


def main() -> int:
    """Returns 1 if something grew."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description="A job under faults.")
    parser.add_argument("what", nargs="?", choices=["job", "oracles"], default="job")
    parser.add_argument("--seconds", type=float, default=100.0, help="of oracles: at most 100 (default)")
    parser.add_argument("--family", default="calls", help="of oracles: a module of tests/oracles")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the operations and faults (default: 0)")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        from tools import soak as module  # functions must not belong to __main__

        module.member(options.member)
        return 0
    if options.what == "oracles":
        return loop_oracles(options.seconds, options.family)
    from tools import soak as module

    return module.soak(60 * options.minutes, options.seed)


if __name__ == "__main__":
    sys.exit(main())
