"""Jobs whose programs are drawn, with each kind of faults: one seed, or many in several processes."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import cycle, islice
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple

from zmqgrad.elastic.agent.death_signal import die_with_parent
from zmqgrad.testing.simulation import dynamic_programs, elastic_programs, oracles, programs
from zmqgrad.testing.simulation.campaign import Faults, Run, run_seed

HOSTS = ("host0", "host1", "host2")
"""Two of them, or all if so many are needed. Half of the jobs whose connections are not disturbed run on the
first only: what is lost within the library shows itself where no acknowledgement wakes who should have been
woken."""


class Kind(NamedTuple):
    """What goes wrong, in which program, and what must be true all the same."""

    program: Callable[[int], object]
    faults: Faults
    check: Callable[[Run, list[Any]], None] = oracles.check
    hosts: int = 2


KINDS = {
    "none": Kind(programs.program, Faults(latency=0.002)),
    "drops": Kind(programs.program, Faults(latency=0.002, dropped=3, within=0.1)),
    "kills": Kind(programs.program_with_losses, Faults(latency=0.005, kills=1, within=0.25)),
    "stops": Kind(programs.program, Faults(latency=0.002, stops=3, within=0.1)),
    "partitions": Kind(programs.program, Faults(latency=0.002, partitions=2, stalls=1, within=0.1, io=0.01)),
    "members": Kind(dynamic_programs.program, Faults(latency=0.002), oracles.check_members),
    "suspicions": Kind(
        dynamic_programs.program_with_suspicions,
        Faults(latency=0.002, partitions=2, lasting=12.0, within=1.0),
        oracles.check_members,
        3,
    ),
    "freezes": Kind(
        dynamic_programs.program_with_freezes,
        Faults(latency=0.002, stops=1, stoppable=(1, 2), lasting=12.0, within=1.0),
        oracles.check_members,
        3,
    ),
    "deaths": Kind(
        dynamic_programs.program_with_deaths,
        Faults(latency=0.005, kills=1, within=0.25, io=0.002),
        oracles.check_members,
    ),
    "broken-rounds": Kind(
        elastic_programs.program, Faults(latency=0.002, kills=1, within=4.0), oracles.check_rounds
    ),
    "rounds": Kind(elastic_programs.program, Faults(latency=0.002), oracles.check_rounds),
}
"""By name."""


def kind_of(seed: int) -> str:
    """Returns what goes wrong at ``seed`` where many seeds are run: each kind in turn."""
    return sorted(KINDS)[seed % len(KINDS)]


def run(seed: int, kind: str | None = None, *, inline: bool = False) -> Run:
    """Runs the program that ``seed`` draws.

    Args:
        kind: of the faults; default: :func:`kind_of` the seed.
        inline: see :func:`~zmqgrad.testing.simulation.simulate`.
    """
    program, faults, check, count = KINDS[kind or kind_of(seed)]
    alone = not (faults.dropped or faults.partitions) and seed % 10 >= 5
    hosts = HOSTS[: 1 if alone else count]
    environment = {programs.HOSTS: str(len(hosts))}
    return run_seed(program, 4, seed, hosts, faults, check, environment=environment, inline=inline)


def run_many(seeds: Iterable[int], jobs: int) -> Iterator[Run]:
    """Runs ``seeds`` in so many processes, each of which forks for each seed. Yields each run as it ends."""
    drawn, context = iter(seeds), multiprocessing.get_context("spawn")
    processors = context.SimpleQueue()
    for processor in islice(cycle(sorted(os.sched_getaffinity(0))), jobs):
        processors.put(processor)
    with ProcessPoolExecutor(jobs, context, _begin, (processors,)) as pool:
        running = {pool.submit(_run_only, seed) for seed in islice(drawn, jobs)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(_run_only, seed) for seed in islice(drawn, len(ended))}
            yield from (each.result() for each in ended)


def _begin(processors: SimpleQueue[int]) -> None:
    """In each process. Its threads take turns, and to wake one on another processor takes longer.

    Warnings are written nowhere, but written: the text of one may take a lock, which is a point, so without
    them a seed would be another schedule than when it runs again.
    """
    campaign = multiprocessing.parent_process()
    if campaign is not None and (request_death_signal := die_with_parent(campaign.pid or 0)) is not None:
        request_death_signal()  # otherwise it would wait for seeds for ever
    logging.getLogger().addHandler(logging.StreamHandler(io.StringIO()))
    os.sched_setaffinity(0, {processors.get()})


def _run_only(seed: int) -> Run:
    found = run(seed)
    found.values, found.messages = {}, []  # the seed repeats them
    return found
