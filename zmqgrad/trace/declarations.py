"""What a log declares: actors, threads, names, and how far it goes. Read once before everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path as FilePath

from zmqgrad.errors import TraceError
from zmqgrad.trace.events import (
    ActorStarted,
    ActorStopped,
    ClockSample,
    Dropped,
    Event,
    NameDeclared,
    Role,
    ThreadDeclared,
)
from zmqgrad.trace.labels import tidy
from zmqgrad.trace.log import LogReader
from zmqgrad.trace.model import Actor, Process

_time_of_event = attrgetter("time")

MAX_APART = 1 << 61
"""Wall clocks that are further apart, 73 years, are taken for this: so twice a time of a job fits 64 bits."""

SAME_NANOSECONDS = 5_000
"""Samples of the clock that differ by less say nothing new: there is one for each second of a job."""

_DECLARATIONS = frozenset((NameDeclared, ThreadDeclared, ActorStarted, ActorStopped, Dropped, ClockSample))
"""What :func:`declare` notes."""


def shift(process: Process, reference: Process) -> Callable[[int], int]:
    """Converts by the wall clocks of both."""
    apart = process.wall_offset - reference.wall_offset if process is not reference else 0
    offset = max(-MAX_APART, min(apart, MAX_APART))  # a log may have any number there
    return lambda time: time + offset


def survey(path: FilePath, on_read: Callable[[int], object] = int) -> Process:
    """Reads a log once: what it declares, and its extent.

    Raises:
        TraceError: if its header cannot be read.
    """
    with LogReader(path, on_read) as reader:
        process = Process(path, reader.info, first=reader.info.monotonic, last=reader.info.monotonic)
        try:
            for batch in reader.batches():
                declare(process, batch)
                if batch:
                    process.last = max(process.last, max(map(_time_of_event, batch)))
        except TraceError as e:
            process.damage = str(e)
    return process


def declare(process: Process, events: Sequence[Event]) -> None:
    """Notes what these events declare."""
    process.events += len(events)
    for event in events:
        if type(event) in _DECLARATIONS:
            _declare(process, event)


def _declare(process: Process, event: Event) -> None:
    if isinstance(event, NameDeclared):
        process.names[event.number] = tidy(event.name)
    elif isinstance(event, ThreadDeclared):
        process.threads[event.thread] = event
    elif isinstance(event, ActorStarted):
        who = (event.actor, event.role, event.name, event.number)
        where = (event.incarnation, event.job, event.address, event.time)
        actor = process.actors[event.actor] = Actor(process, *who, *where)
        if actor.role in (Role.WORKER, Role.RENDEZVOUS_NODE):
            process.named.append(actor)
    elif isinstance(event, ActorStopped):
        if event.actor in process.actors:
            process.actors[event.actor].stopped = event.time
    elif isinstance(event, Dropped):
        process.dropped += event.count
        process.dropped_until = max(process.dropped_until, event.time)
    elif isinstance(event, ClockSample):
        wall, time = process.samples[-1] if process.samples else (0, 0)
        if abs(event.wall - event.time - (wall - time)) > SAME_NANOSECONDS:  # the first one, in any case
            process.samples.append((event.wall, event.time))
