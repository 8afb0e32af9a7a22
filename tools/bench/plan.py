"""Which rows there are, and which pieces measure them: a piece is one run of fresh processes of one side."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.bench.groups import SIZES, run_groups
from tools.bench.limits import COPIES, ROUND_TRIP, run_limits
from tools.bench.pipeline import MICRO_BATCHES, STAGES, run_pipeline
from tools.bench.processes import Hear, run_together
from tools.bench.startup import ROUNDS, run_group
from tools.bench.stores import AS_ROUND_TRIPS, PROCESSES, QUESTIONS, TOGETHER, run_store
from tools.bench.timing import Budget
from tools.bench.workloads import WORKLOADS, run_workloads
from tools.ports import free_port

PATIENCE = 600.0
"""Seconds that a piece may take at most."""


@dataclass(frozen=True)
class Row:
    """Something that is measured. ``limit``: the row of what the machine would take for it at least."""

    name: str
    says: str
    limit: str = ""


@dataclass(frozen=True)
class Piece:
    """Measures ``rows``; ``run(side, hear)`` gives seconds by name, from each process."""

    title: str
    rows: Sequence[Row]
    run: Callable[[str, Hear], list[dict[str, float]]]


def pieces(chosen: Callable[[str], bool], workers: Sequence[int], budget: Budget) -> list[Piece]:
    """What measures the rows whose names are ``chosen``, with groups of so many ``workers``."""
    calls = [Row(w.name, w.says, w.limit) for w in WORKLOADS]
    said = {name: says for name, (says, _) in QUESTIONS.items()} | TOGETHER
    stores = [Row(n, says, ROUND_TRIP if n in AS_ROUND_TRIPS else "") for n, says in said.items()]
    made = [
        Piece("calls", calls, lambda side, hear: _calls(side, hear, _names(calls, chosen), budget)),
        _pipeline(budget),
        *[_group(size) for size in workers],
        *[_calls_to_groups(called, chosen, budget) for called in SIZES],
        Piece("store", stores, lambda side, hear: _store(side, hear, _names(stores, chosen), budget)),
    ]
    kept = [Piece(p.title, [row for row in p.rows if chosen(row.name)], p.run) for p in made]
    return [piece for piece in kept if piece.rows]


def limits(rows: Sequence[Row], budget: Budget) -> Piece | None:
    """What measures the limits of ``rows``, if they have any."""
    names = {row.limit for row in rows} - {""}
    if not names:
        return None
    found = [Row(ROUND_TRIP, "a message there and back over bare ZeroMQ")]
    found += [Row(name, "a copy of so much in warm memory") for name in COPIES if name in names]
    return Piece("limits", found, lambda side, hear: _limits(hear, sorted(names), budget))


def _names(rows: Sequence[Row], chosen: Callable[[str], bool]) -> list[str]:
    return [row.name for row in rows if chosen(row.name)]


def _group(size: int) -> Piece:
    rows = [
        Row(f"init_{size}", f"{size} workers start, imports aside"),
        Row(f"all_to_all_{size}", f"each of {size} calls each, one round of {ROUNDS}"),
        Row(f"shutdown_{size}", f"{size} workers leave"),
    ]

    def run(side: str, hear: Hear) -> list[dict[str, float]]:
        meet_at_a_free_port()
        return run_together(run_group, size, PATIENCE, hear, side)

    return Piece(f"{size} workers", rows, run)


def _calls_to_groups(called: int, chosen: Callable[[str], bool], budget: Budget) -> Piece:
    rows = [Row(name, says) for name, says in SIZES[called].items()]

    def run(side: str, hear: Hear) -> list[dict[str, float]]:
        meet_at_a_free_port()
        names = _names(rows, chosen)
        return run_together(run_groups, called + 1, PATIENCE, hear, side, names, budget)

    return Piece(f"calls to {called}", rows, run)


def _pipeline(budget: Budget) -> Piece:
    row = Row("pipeline", f"backward alone, of {STAGES} stages and {MICRO_BATCHES} micro-batches in flight")

    def run(side: str, hear: Hear) -> list[dict[str, float]]:
        meet_at_a_free_port()
        return run_together(run_pipeline, STAGES + 1, PATIENCE, hear, side, row.name, budget)

    return Piece("pipeline", [row], run)


def _calls(side: str, hear: Hear, names: list[str], budget: Budget) -> list[dict[str, float]]:
    meet_at_a_free_port()
    return run_together(run_workloads, 2, PATIENCE, hear, side, names, budget)


def _store(side: str, hear: Hear, names: list[str], budget: Budget) -> list[dict[str, float]]:
    return run_together(run_store, PROCESSES, PATIENCE, hear, side, free_port(), names, budget)


def _limits(hear: Hear, names: list[str], budget: Budget) -> list[dict[str, float]]:
    endpoint = f"ipc://@zmqgrad-bench-{secrets.token_hex(8)}"
    return run_together(run_limits, 2, PATIENCE, hear, endpoint, names, budget)


def meet_at_a_free_port() -> None:
    """Tell processes that are started after this where to find one another."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
