"""What published tensors cost: against a memcpy on one host, and against one send between two.

    python -m tools.bench.published [--mb 1024] [--rounds 5] [--layers 256] [--hosts]

prints, of warm memory:

    publish   a version, against ``memmove`` of as many bytes to shared memory, in turn
    reader    milliseconds until a further reader of the host has a version
    hosts     with ``--hosts`` (root and iproute2): from the announcement of a version until four readers of
              another host have it, against one call with as many bytes, in turn
    group     with ``--hosts``, a group call of these four with as many bytes, against the same
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.support.namespaces import Hosts, enter
from tools.bench import machine
from tools.bench.plan import meet_at_a_free_port
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.timing import seconds_of
from zmqgrad import rpc

WARM = 4
"""Rounds that are not counted: the memory of as many versions is touched for the first time."""

LIMIT_SECONDS = 170.0
FAR_READERS = 4
PORT = 29617

GOALS = {"publish": 1.3, "reader": 1.0, "hosts": 1.2, "group": 1.2}


def make_state(mb: int, layers: int) -> dict[str, torch.Tensor]:
    """``mb`` MB in as many tensors."""
    return {f"layer{n}": torch.full(((mb << 20) // layers // 4,), float(n)) for n in range(layers)}


def options(mb: int) -> rpc.RpcBackendOptions:
    """Room for five versions."""
    return rpc.RpcBackendOptions(arena_limit=5 * (mb << 20) + (64 << 20), rpc_timeout=LIMIT_SECONDS)


def on_one_host(place: Place, mb: int, layers: int, rounds: int) -> dict[str, float]:
    """0 publishes; 1 reads; 2 subscribes once for each round, as a further reader."""
    names = [f"w{n}" for n in range(place.count)]
    rpc.init_rpc(f"w{place.rank}", rank=place.rank, world_size=place.count, rpc_backend_options=options(mb))
    found: dict[str, float] = {}
    if place.rank == 0:
        found = publish_often(make_state(mb, layers), names, rounds)
    else:
        subscription = rpc.subscribe("state")
        taken = []
        for _ in range(rounds + WARM):
            rpc.barrier(names)
            if place.rank == 2:
                began = time.perf_counter()
                further = rpc.subscribe("state")
                taken.append(time.perf_counter() - began)
                further.close()
            rpc.barrier(names)
        if taken:
            found = {"reader": 1000 * statistics.median(taken)}
        subscription.close()
    rpc.shutdown()
    return found


def publish_often(state: dict[str, torch.Tensor], names: list[str], rounds: int) -> dict[str, float]:
    """The ratio of publishing ``state`` to a memcpy of it, which take turns."""
    size = sum(t.nbytes for t in state.values())
    source, target = (mmap.mmap(-1, size, flags=mmap.MAP_SHARED) for _ in range(2))
    source[:] = bytes(1) * size
    to, of = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (target, source))
    ratios = []
    for number in range(rounds + WARM):
        copied = seconds_of(lambda: ctypes.memmove(to, of, size))
        published = seconds_of(lambda: rpc.publish("state", state))
        if number >= WARM:
            ratios.append(published / copied)
            print(f"memcpy {copied:.3f} s, publish {published:.3f} s", file=sys.stderr)
        rpc.barrier(names)
        rpc.barrier(names)
    return {"publish": statistics.median(ratios)}


def between_hosts(place: Place, mb: int, layers: int, rounds: int) -> dict[str, float]:
    """0 publishes on one host; the others read on the other one."""
    os.environ["MASTER_PORT"] = str(PORT)
    enter(0 if place.rank == 0 else 1)
    names = [f"w{n}" for n in range(place.count)]
    rpc.init_rpc(f"w{place.rank}", rank=place.rank, world_size=place.count, rpc_backend_options=options(mb))
    ratios, group_ratios = [], []
    if place.rank == 0:
        state, whole, group = make_state(mb, layers), torch.ones(mb << 18), rpc.group(names[1:])
        for turn in range(rounds + WARM):
            sent = seconds_of(lambda: rpc.rpc_sync("w1", consume, args=(whole,)))
            called = seconds_of(lambda: group.call(consume, (whole,)))
            began = time.perf_counter()
            number = rpc.publish("state", state)
            published = time.perf_counter()
            rpc.wait_all([rpc.rpc_async(name, has_version, args=(number,)) for name in names[1:]])
            read = time.perf_counter() - published
            if turn >= WARM:
                ratios.append(read / sent)
                group_ratios.append(called / sent)
                print(
                    f"one send {sent:.3f} s, group call {called:.3f} s, publish {published - began:.3f} s, "
                    f"then read {read:.3f} s",
                    file=sys.stderr,
                )
    rpc.shutdown()
    return {"hosts": statistics.median(ratios), "group": statistics.median(group_ratios)} if ratios else {}


def consume(x: torch.Tensor) -> None:
    """Runs on the other host."""


_subscriptions: list[rpc.Subscription] = []


def has_version(number: int) -> None:
    """Runs on a reader: return when version ``number`` is there."""
    if not _subscriptions:
        _subscriptions.append(rpc.subscribe("state"))
    _subscriptions[0].wait(number - 1)


def measure(function: Callable[..., dict[str, float]], count: int, *args: Any) -> dict[str, float]:
    """The figures of all processes."""
    found: dict[str, float] = {}
    for figures in run_together(function, count, LIMIT_SECONDS, lambda text: None, *args):
        found.update(figures)
    return found


def main() -> int:
    """Print the figures, and whether they reach the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=256)
    parser.add_argument("--hosts", action="store_true")
    args = parser.parse_args()
    rest = args.mb, args.layers, args.rounds
    try:
        if args.hosts:
            hosts = Hosts(os.getpid())
            hosts.open()
            try:
                os.environ.update(hosts.environment())
                del os.environ["ZMQGRAD_SECRET"]
                os.environ["ZMQGRAD_ALLOW_INSECURE"] = "1"
                found = measure(between_hosts, 1 + FAR_READERS, *rest)
            finally:
                hosts.close()
        else:
            meet_at_a_free_port()
            found = measure(on_one_host, 3, *rest)
    except PieceFailed as e:
        print(e, file=sys.stderr)
        return 1
    print(f"# {machine.describe()}, load {machine.load()}")
    for name, figure in found.items():
        print(f"{name:8} {figure:.2f}  (goal {GOALS[name]})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
