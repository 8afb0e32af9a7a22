"""What a log declares: actors, threads, names, and how far it goes. Read once before everything else."""

from __future__ import annotations

from collections.abc import Callable
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
    ThreadDeclared,
)
from zmqgrad.trace.log import LogReader
from zmqgrad.trace.model import Actor, Process

JUMP_NANOSECONDS = 100_000_000
"""A wall clock that moves by more than this against the monotonic one between two samples has jumped."""

_time_of_event = attrgetter("time")

_DECLARATIONS = frozenset((NameDeclared, ThreadDeclared, ActorStarted, ActorStopped, Dropped, ClockSample))
"""What :func:`declare` notes."""


def shift(process: Process, reference: Process) -> Callable[[int], int]:
    """Converts by the wall clocks of both."""
    offset = process.wall_offset - reference.wall_offset if process is not reference else 0
    return lambda time: time + offset


def survey(path: FilePath, on_read: Callable[[int], object] = int) -> Process:
    """Reads a log once: what it declares, and its extent.

    Raises:
        TraceError: if its header cannot be read.
    """
    with LogReader(path, on_read) as reader:
        process = Process(path, reader.info, first=reader.info.monotonic, last=reader.info.monotonic)
        wall = process.wall_offset
        try:
            for batch in reader.batches():
                process.events += len(batch)
                for event in batch:
                    if type(event) in _DECLARATIONS:
                        wall = declare(process, event, wall)
                if batch:
                    process.last = max(process.last, max(map(_time_of_event, batch)))
        except TraceError as e:
            process.damage = str(e)
    return process


def declare(process: Process, event: Event, wall: int) -> int:
    """Notes what ``event`` declares. Returns what the wall clock is ahead of the monotonic one by now."""
    if isinstance(event, NameDeclared):
        process.names[event.number] = event.name
    elif isinstance(event, ThreadDeclared):
        process.threads[event.thread] = event
    elif isinstance(event, ActorStarted):
        who = (event.actor, event.role, event.name, event.number)
        where = (event.incarnation, event.job, event.address, event.time)
        process.actors[event.actor] = Actor(process, *who, *where)
    elif isinstance(event, ActorStopped):
        if event.actor in process.actors:
            process.actors[event.actor].stopped = event.time
    elif isinstance(event, Dropped):
        process.dropped += event.count
    elif isinstance(event, ClockSample):
        if abs(event.wall - event.time - wall) > JUMP_NANOSECONDS:
            process.jumps.append(event.time)
        return event.wall - event.time
    return wall
