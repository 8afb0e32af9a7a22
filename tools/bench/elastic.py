"""Elastic rendezvous and restarts, zmqgrad and torch in turn, in real processes.

    python -m tools.bench.elastic                      # all figures, 5 rounds
    python -m tools.bench.elastic -k 'rendezvous*' -r 20
    python -m tools.bench.elastic --ours torchrun      # the launcher of torch over the rendezvous of zmqgrad

- ``rendezvous_N``: N nodes, the maximum, so that the round completes at once. From the moment when the last
  process calls next_rendezvous until all have returned; the stores are connected before.
- ``restart``: a worker of two is killed by SIGKILL. Until the last worker of the next round executes its
  first line; ``restart_torch``: until it has imported torch.
- ``join``: a second node starts (``--nnodes 1:2``). Until the last worker of the round of both executes its
  first line; the start of the launcher's own process counts.
- ``spare``: one of two nodes is killed by SIGKILL while a third waits (``--nnodes 2``). Until the last worker
  of the next round executes its first line.
- ``nodes_64``: as ``rendezvous_N``, 64 processes without torch, zmqgrad only; then the traffic of their
  keep-alives at the store, for some seconds.

Figures are medians over the rounds; a ratio below 1 means that zmqgrad takes less time. The goals are ratios.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic import rendezvous as torchelastic
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

from tools.bench import elastic_launchers, elastic_nodes, machine, report
from tools.bench.__main__ import measure
from tools.bench.elastic_launchers import LAUNCHERS
from tools.bench.plan import Piece, Row
from tools.bench.processes import Hear, PieceFailed, Place, run_together
from tools.bench.results import Results
from tools.bench.sides import OURS, TORCH
from tools.ports import free_port
from zmqgrad.interop import torchrun

SIZES = (2, 4, 8)
NODES = 64
LIMIT_SECONDS = 120.0
GOALS = {
    **{f"rendezvous_{n}": 0.1 for n in SIZES},
    "restart": 0.3,
    "restart_torch": 0.3,
    "join": 0.5,
    "spare": 0.2,
}


def rendezvous(place: Place, side: str, port: int) -> dict[str, float]:
    """Runs in each process. Returns when this node began, and when it knew the round."""
    torch_handler = side == TORCH
    parameters = torchelastic.RendezvousParameters(
        "c10d" if torch_handler else "zmqgrad",
        f"127.0.0.1:{port}",
        "bench",
        place.count,
        place.count,
        local_addr="127.0.0.1",
        is_host=str(place.rank == 0).lower(),
    )
    handler: Any
    if torch_handler:
        backend, store = c10d_rendezvous_backend.create_backend(parameters)
        handler = dynamic_rendezvous.create_handler(store, backend, parameters)
    else:
        handler = torchrun.create("zmqgrad", parameters)
    began = place.together()
    found = handler.next_rendezvous()
    ended = time.perf_counter()
    if found.world_size != place.count:
        raise PieceFailed(f"a round of {found.world_size} nodes instead of {place.count}")
    place.together()  # the others have it, too
    handler.shutdown()
    place.together()  # the first process serves the store
    return {"began": began, "ended": ended}


def run_rendezvous(nodes: int, side: str, hear: Hear) -> list[dict[str, float]]:
    """Measure one rendezvous of ``nodes`` processes."""
    times = run_together(rendezvous, nodes, LIMIT_SECONDS, hear, side, free_port())
    seconds = max(t["ended"] for t in times) - max(t["began"] for t in times)
    return [{f"rendezvous_{nodes}": seconds}]


def pieces(ours: str) -> list[Piece]:
    """Everything that both sides can do. ``ours``: the launcher of zmqgrad's side."""

    def launched(name: str, run: Callable[[str], float]) -> Callable[[str, Hear], list[dict[str, float]]]:
        return lambda side, hear: [{name: run(ours if side == OURS else "torchrun-c10d")}]

    made = [
        Piece(f"{n} nodes", [Row(f"rendezvous_{n}", f"{n} nodes meet")], partial(run_rendezvous, n))
        for n in SIZES
    ]
    rows = {
        "restart": (elastic_launchers.restart, "a killed worker until the next round runs"),
        "restart_torch": (elastic_launchers.restart_with_torch, "the same, with import torch"),
        "join": (elastic_launchers.join, "a node starts until the round of both runs"),
        "spare": (elastic_launchers.spare, "a killed node until a round with the spare runs"),
    }
    return made + [Piece(name, [Row(name, says)], launched(name, run)) for name, (run, says) in rows.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save. Returns 1 if a figure is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.elastic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-k", dest="select", default="*", metavar="PATTERN", help="figures, as in 're*'")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument(
        "--ours", choices=LAUNCHERS, default="zmqgrad", help="zmqgrad's launcher (default: zmqgrad)"
    )
    parser.add_argument(
        "--nodes", type=int, default=NODES, help=f"of the large rendezvous (default: {NODES})"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="to count keep-alives (default: 15)")
    parser.add_argument("--no-torch", action="store_true", help="zmqgrad alone")
    parser.add_argument("--out", type=Path, default=Path("runs/elastic.json"), help="figures of all rounds")
    options = parser.parse_args(arguments)
    todo = [p for p in pieces(options.ours) if fnmatch.fnmatchcase(p.rows[0].name, options.select)]
    large = fnmatch.fnmatchcase("nodes_64", options.select)
    if not todo and not large:
        parser.error(f"-k {options.select} matches no figure")
    results = Results([row for piece in todo for row in piece.rows])
    status = measure(options, todo, None, results)
    facts: dict[str, dict[str, Any]] = {
        "machine": machine.describe(),
        "settings": {"rounds": str(options.rounds), "launcher": options.ours, "load": machine.load()},
        "goals": GOALS,
    }
    if todo:
        report.print_table(results)
    if large and status != 130:
        facts["large"] = elastic_nodes.measure(options.nodes, options.seconds)
        print(f"\n{options.nodes} nodes:")
        report.print_facts({name: f"{value:.3g}" for name, value in facts["large"].items()})
    print("\ngoals (ratio):", json.dumps(GOALS))
    report.save_json(results, facts, options.out)
    print("saved", options.out)
    for failure in results.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
