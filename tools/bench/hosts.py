"""Large and small messages between two network namespaces, as between two hosts.

    python -m tools.bench.hosts [--rounds N] [--sides NAMES] [-k ROWS] [--scale F] [--out FILE]

The two share no other namespace, either: no side can copy from memory of the other process.

Sides: ``torch``; ``secret`` and ``open`` (zmqgrad with and without a secret); ``grpc``, where it is installed
(:mod:`tools.bench.grpc_rpc`); ``zmq``, a bare DEALER and ROUTER that exchange messages of at most 4 MB;
``tcp``, a bare stream. Rounds are taken in turn, each in fresh processes; a figure is the median of the
rounds, beside the best of them. ``call_beside`` is the 99th percentile of calls during a transfer of 1 GB,
``call_p99`` that of an idle line. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq

from tests.support.namespaces import Hosts, move_apart
from tools.bench import machine
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.report import duration
from tools.bench.timing import seconds_of

MODULES = {
    "torch": "torch.distributed.rpc",
    "secret": "zmqgrad.rpc",
    "open": "zmqgrad.rpc",
    "grpc": "tools.bench.grpc_rpc",
}
BARE_SIDES = ("zmq", "tcp")
ENVIRONMENT = {
    "secret": {"ZMQGRAD_SECRET": "0123456789abcdef0123456789abcdef"},
    "open": {"ZMQGRAD_ALLOW_INSECURE": "1"},
}
SENDS = {1: 30, 16: 10, 64: 5, 256: 3}
"""How often each size, in MB, is sent."""
CALLS, FLOOD, BESIDE_MB = 300, 500, 1024
CHUNK_BYTES = 4 << 20
PORT = 29611
LIMIT_SECONDS = 180.0

Figures = dict[str, float]
Send = Callable[[memoryview], object]


def noop() -> None:
    """Runs on the other host."""


def consume(x: torch.Tensor) -> None:
    """Runs on the other host."""


def echo(x: torch.Tensor) -> torch.Tensor:
    """Runs on the other host."""
    return x


def join(place: Place, side: str) -> Any:
    """Makes this process a worker of a host of its own. Returns the RPC module of ``side``."""
    move_apart(place.rank)
    device = next(name for _, name in socket.if_nameindex() if name != "lo")
    os.environ.update(MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME=device, TP_SOCKET_IFNAME=device)
    rpc = importlib.import_module(MODULES[side])
    rpc.init_rpc(f"w{place.rank}", rank=place.rank, world_size=place.count)
    return rpc


def run_rpc(place: Place, side: str, rows: str, scale: float) -> Figures:
    """The figures of a side, from the first of two workers."""
    rpc = join(place, side)
    found = _measure(place, rpc, rows, scale) if place.rank == 0 else {}
    rpc.shutdown()
    return found


@contextmanager
def environment_of(side: str, hosts: Hosts) -> Iterator[None]:
    """Processes that are started within it are those of ``side``."""
    before = dict(os.environ)
    os.environ.update(hosts.environment())
    del os.environ["ZMQGRAD_SECRET"]
    os.environ.update(ENVIRONMENT.get(side, {}), BENCH_SERVER=f"{hosts.addresses[1]}:{PORT}")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _measure(place: Place, rpc: Any, rows: str, scale: float) -> Figures:
    def call() -> None:
        rpc.rpc_sync("w1", noop)

    def flood() -> None:
        for future in [rpc.rpc_async("w1", noop) for _ in range(FLOOD)]:
            future.wait()

    def send(mb: int, function: Callable[[torch.Tensor], object] = consume) -> Callable[[], object]:
        place.say(f"{function.__name__} {mb} MB")
        x = torch.ones(mb << 18)
        return lambda: rpc.rpc_sync("w1", function, args=(x,))

    idle = _repeat(call, CALLS, scale)
    found = {"call": statistics.median(idle), "call_p99": _p99(idle)}
    works: dict[str, Callable[[], float]] = {
        "call_beside": lambda: _p99(_beside(call, send(max(1, int(BESIDE_MB * min(1.0, scale)))))),
        "flood": lambda: _median(flood, 3, scale),
    }
    for mb, count in SENDS.items():
        works[f"send_{mb}MB"] = lambda mb=mb, count=count: _median(send(mb), count, scale)  # type: ignore[misc]
    works["echo_16MB"] = lambda: _median(send(16, echo), 5, scale)
    return found | {row: work() for row, work in works.items() if _is_chosen(row, rows)}


def _is_chosen(row: str, rows: str) -> bool:
    return any(fnmatch.fnmatchcase(row, pattern) for pattern in rows.split(","))


def _beside(call: Callable[[], None], transfer: Callable[[], object]) -> list[float]:
    """Seconds of each call while ``transfer`` runs in another thread."""
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(transfer)
        taken = [seconds_of(call)]
        while not ended.done():
            taken.append(seconds_of(call))
        ended.result()
    return taken


def _repeat(work: Callable[[], object], count: int, scale: float) -> list[float]:
    for _ in range(2):
        work()
    return [seconds_of(work) for _ in range(max(3, int(count * scale)))]


def _median(work: Callable[[], object], count: int, scale: float) -> float:
    return statistics.median(_repeat(work, count, scale))


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def run_bare(place: Place, side: str, address: str, scale: float) -> Figures:
    """The same sends over bare sockets, each acknowledged by a message of one byte."""
    move_apart(place.rank)
    return (_run_tcp if side == "tcp" else _run_zmq)(place, address, scale)


def _sends(send: Send, scale: float) -> Figures:
    data = memoryview(bytearray(b"x") * (max(SENDS) << 20))
    return {
        f"send_{mb}MB": _median(lambda mb=mb: send(data[: mb << 20]), count, scale)  # type: ignore[misc]
        for mb, count in SENDS.items()
    }


def _sizes(scale: float) -> Iterator[int]:
    """The bytes of each message that :func:`_sends` sends."""
    for mb, count in SENDS.items():
        yield from [mb << 20] * (2 + max(3, int(count * scale)))


def _run_tcp(place: Place, address: str, scale: float) -> Figures:
    if place.rank == 0:
        place.together()
        with socket.create_connection((address, PORT)) as connection:

            def send(data: memoryview) -> None:
                connection.sendall(data)
                connection.recv(1)

            return _sends(send, scale)
    with socket.create_server((address, PORT)) as server:
        place.together()
        connection, _ = server.accept()
        warm = memoryview(bytearray(b"x") * (max(SENDS) << 20))
        with connection:
            for size in _sizes(scale):
                while size:
                    size -= connection.recv_into(warm[:size]) or sys.exit("the connection broke")
                connection.send(b"k")
    return {}


def _run_zmq(place: Place, address: str, scale: float) -> Figures:
    kind = zmq.DEALER if place.rank == 0 else zmq.ROUTER
    with zmq.Context() as context, context.socket(kind) as s:
        s.sndhwm = s.rcvhwm = 0
        if place.rank == 0:
            place.together()
            s.connect(f"tcp://{address}:{PORT}")

            def send(data: memoryview) -> None:
                for start in range(0, len(data), CHUNK_BYTES):
                    s.send(data[start : start + CHUNK_BYTES], copy=False)
                s.recv()

            return _sends(send, scale)
        s.bind(f"tcp://{address}:{PORT}")
        place.together()
        for size in _sizes(scale):
            while size:
                identity, frame = s.recv_multipart(copy=False)
                size -= len(frame)
            s.send_multipart([identity, b"k"])
    return {}


def measure(
    hosts: Hosts, names: Sequence[str], rows: str, rounds: int, scale: float
) -> tuple[dict[str, Any], list[str]]:
    """Returns the figures of each round by side and row, and what failed."""
    found: dict[str, dict[str, list[float]]] = {side: {} for side in names}
    failures = []
    for number in range(rounds):
        for side in names if number % 2 == 0 else reversed(names):
            print(f"round {number + 1} of {rounds}: {side}", file=sys.stderr, flush=True)
            try:
                with environment_of(side, hosts):
                    figures = (
                        run_together(run_rpc, 2, LIMIT_SECONDS, _ignore, side, rows, scale)
                        if side in MODULES
                        else run_together(
                            run_bare, 2, LIMIT_SECONDS, _ignore, side, hosts.addresses[1], scale
                        )
                    )
                for row, seconds in figures[0].items():
                    found[side].setdefault(row, []).append(seconds)
            except PieceFailed as e:
                failures.append(f"{side}, round {number + 1}: {e}")
    return found, failures


def _ignore(text: str) -> None:
    pass


def show(found: dict[str, dict[str, list[float]]]) -> None:
    """Prints a line for each row: median and best of each side, and the ratio of the medians to torch's."""
    rows = list(dict.fromkeys(row for figures in found.values() for row in figures))
    print(f"{'':14}" + "".join(f"{side:>26}" for side in found))
    for row in rows:
        limit = found.get("torch", {}).get(row)
        line = f"{row:14}"
        for figures in found.values():
            seconds = figures.get(row)
            ratio = (
                f"{statistics.median(seconds) / statistics.median(limit):.2f}" if seconds and limit else "-"
            )
            cell = f"{duration(statistics.median(seconds))} ({duration(min(seconds))})" if seconds else "-"
            line += f"{cell:>20}{ratio:>6}"
        print(line)
    for side, figures in found.items():
        if "call_beside" in figures:
            beside, idle = (statistics.median(figures[row]) for row in ("call_beside", "call_p99"))
            print(
                f"{side}: a call beside the transfer takes {beside / idle:.1f} x that of an idle line (p99)"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table and saves all figures. Returns 1 if something could not be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default=",".join([*MODULES, *BARE_SIDES]), help="names, with commas")
    parser.add_argument("-k", dest="rows", default="*", help="rows of the RPC sides: names or patterns")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of repetitions, and below 1 of the 1 GB (default: 1)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench/hosts.json"))
    options = parser.parse_args(arguments)
    names = options.sides.split(",")
    if unknown := set(names) - {*MODULES, *BARE_SIDES}:
        parser.error(f"unknown sides: {', '.join(sorted(unknown))}")
    if "grpc" in names and importlib.util.find_spec("grpc") is None:
        names.remove("grpc")
        print("gRPC is left out: the package grpcio is not installed", file=sys.stderr)
    facts = {**machine.describe(), "load at the beginning": machine.load()}
    began = time.monotonic()
    hosts = Hosts(os.getpid())
    try:
        hosts.open()
        found, failures = measure(hosts, names, options.rows, options.rounds, options.scale)
    except (FileNotFoundError, subprocess.CalledProcessError) as e:
        print(f"no network namespaces (they need root and iproute2): {e}", file=sys.stderr)
        return 1
    finally:
        hosts.close()
    facts |= {"load at the end": machine.load(), "seconds": f"{time.monotonic() - began:.0f}"}
    show(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "seconds": found, "failures": failures}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"load {facts['load at the beginning']} to {facts['load at the end']}; saved {options.out}")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
