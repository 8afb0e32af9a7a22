"""What runs in each worker of ``python -m tools.bench.scale``, and what a process uses at a moment."""

from __future__ import annotations

import os
import re
import resource
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tools.bench.processes import Place
from tools.bench.sides import OURS, take
from tools.bench.workloads import nothing
from zmqgrad.transport import tap
from zmqgrad.transport.tap import STORE_CLIENT, WORKER, Identity

STAGES = ("joined", "ring", "all")
"""Nothing was sent to another worker; each has called its successor; each has called each."""


class _Counting:
    """The tracer of one object: counts its messages; the other events of a tracer pass unnoticed."""

    records_arguments = False
    records_heartbeats = True

    def __init__(self, role: int, traffic: Counter[str]) -> None:
        self._role = role
        self._traffic = traffic

    def tap(self, outgoing: bool, peer: int, envelope: Any, message: Any, size: int, *rest: object) -> None:
        if self._role == STORE_CLIENT:
            self._count("store", size)
        elif self._role == WORKER and outgoing:
            self._count("rpc", size)

    def heartbeat(self, peer: int, outgoing: bool) -> None:
        self._count("heartbeat", 1)

    def _count(self, kind: str, size: int) -> None:
        self._traffic[f"{kind} messages"] += 1  # two threads may lose a count, which is no matter here
        self._traffic[f"{kind} bytes"] += size

    def __getattr__(self, name: str) -> Any:
        return _pass


def _pass(*args: object, **kwargs: object) -> None:
    """An event that is not counted."""


class _Recorder:
    """Counts the messages of all that is traced in this process."""

    def __init__(self) -> None:
        self.traffic: Counter[str] = Counter()

    def attach(self, identity: Identity) -> Any:
        return _Counting(identity.role, self.traffic)

    def in_child(self) -> None:
        return None


def run_worker(place: Place, side_name: str, idle_seconds: float) -> dict[str, float]:
    """In each worker: the seconds of each stage, what it uses then, and what it does while idle."""
    torch.set_num_threads(1)
    recorder = _Recorder()
    if side_name == OURS:
        tap.activate(recorder)
    side = take(side_name)
    before = usage()
    found: dict[str, float] = {}

    def finish(stage: str, began: float) -> None:
        found[f"{stage} seconds"] = time.perf_counter() - began
        place.together()
        now = usage()
        for name in ("descriptors", "threads"):
            now[name] -= before[name]
        idle = _idle(place, recorder.traffic, idle_seconds)
        found.update({f"{stage} {name}": value for name, value in (now | idle).items()})

    for stage, peers in (("joined", ()), ("ring", (1,)), ("all", range(1, place.count))):
        if place.rank == 0:
            place.say(stage)
        began = place.together()
        if stage == "joined":
            side.rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
        names = [f"worker{(place.rank + n) % place.count}" for n in peers]
        for future in [side.rpc.rpc_async(name, nothing) for name in names]:
            future.wait()
        finish(stage, began)
    began = place.together()
    side.rpc.shutdown()
    found["shutdown seconds"] = time.perf_counter() - began
    return found


def _idle(place: Place, traffic: Counter[str], seconds: float) -> dict[str, float]:
    """What this process does in a second while its program does nothing."""
    place.together()
    before, work, began = Counter(traffic), _work(), time.perf_counter()
    threading.Event().wait(seconds)  # a window of time, not an event
    elapsed = time.perf_counter() - began
    done: dict[str, float] = {name: count - before[name] for name, count in traffic.items()}
    done |= {name: value - work[name] for name, value in _work().items()}
    place.together()
    return {f"{name}/s": value / elapsed for name, value in done.items()}


def _work() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"wake-ups": used.ru_nvcsw, "cpu ms": 1000 * (used.ru_utime + used.ru_stime)}


def usage() -> dict[str, float]:
    """Memory in MiB, descriptors and threads of this process. Linux only.

    ``pss`` counts a page shared by n processes as 1/n of it, ``private`` only the pages of this process.
    """
    text = Path("/proc/self/smaps_rollup").read_text()
    kilobytes = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return {
        "pss": kilobytes["Pss"] / 1024,
        "private": (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) / 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
