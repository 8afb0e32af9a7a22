"""Jobs whose programs are drawn, with each kind of faults: one seed, or many in several processes."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice

from zmqgrad.testing.simulation import oracles, programs
from zmqgrad.testing.simulation.campaign import Faults, Run, run_seed

HOSTS = ("host0", "host1")
"""Half of the jobs whose connections are not disturbed run on the first only: what is lost within the library
shows itself where no acknowledgement wakes who should have been woken."""

KINDS = {
    "none": (programs.program, Faults(latency=0.002)),
    "drops": (programs.program, Faults(latency=0.002, dropped=3, within=0.1)),
    "kills": (programs.program_with_losses, Faults(latency=0.005, kills=1, within=0.25)),
    "stops": (programs.program, Faults(latency=0.002, stops=3, within=0.1)),
    "partitions": (programs.program, Faults(latency=0.002, partitions=2, stalls=1, within=0.1, io=0.01)),
}
"""What goes wrong, by name, and in which program."""


def kind_of(seed: int) -> str:
    """Returns what goes wrong at ``seed`` where many seeds are run: each kind in turn."""
    return sorted(KINDS)[seed % len(KINDS)]


def run(seed: int, kind: str | None = None, *, inline: bool = False) -> Run:
    """Runs the program that ``seed`` draws.

    Args:
        kind: of the faults; default: :func:`kind_of` the seed.
        inline: see :func:`~zmqgrad.testing.simulation.simulate`.
    """
    program, faults = KINDS[kind or kind_of(seed)]
    alone = not (faults.dropped or faults.partitions) and seed // len(KINDS) % 2 == 1
    return run_seed(program, 4, seed, HOSTS[:1] if alone else HOSTS, faults, oracles.check, inline=inline)


def run_many(seeds: Iterable[int], jobs: int) -> Iterator[Run]:
    """Runs ``seeds`` in so many processes, each of which forks for each seed. Yields each run as it ends."""
    drawn = iter(seeds)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), logging.disable) as pool:
        running = {pool.submit(_run_only, seed) for seed in islice(drawn, jobs)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(_run_only, seed) for seed in islice(drawn, len(ended))}
            yield from (each.result() for each in ended)


def _run_only(seed: int) -> Run:
    found = run(seed)
    found.values, found.messages = {}, []  # the seed repeats them
    return found
