"""Processes of a job that still run on this host, and their stacks on request."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from zmqgrad.errors import TraceError
from zmqgrad.runtime.clock import Clock, wall_ns
from zmqgrad.trace.events import StackDumped
from zmqgrad.trace.follow import REMOTE_SILENCE_NANOSECONDS, is_recording
from zmqgrad.trace.job import Job
from zmqgrad.trace.log import LogReader
from zmqgrad.trace.model import Process
from zmqgrad.trace.stacks import request_stacks
from zmqgrad.trace.writer import own_clock

POLL_SECONDS = 0.05
"""How often logs are read for the reply. No event tells of a file that grows, on all systems and mounts."""

REPEAT_SECONDS = 0.5
"""When a request is repeated: a process whose recorder is just starting does not notice the first one."""


def is_live(process: Process) -> bool:
    """Whether ``process`` still records; of another host: whether it did in the last minute."""
    is_here = (process.info.host, process.clock) == (socket.gethostname(), own_clock())
    silence = wall_ns() - process.last - process.wall_offset
    return is_recording(process) and (is_here or silence < REMOTE_SILENCE_NANOSECONDS)


def running(job: Job) -> list[Process]:
    """The processes of this host that run and record."""
    here, clock = socket.gethostname(), own_clock()
    return [
        p
        for p in job.processes
        if (p.info.host, p.info.clock) == (here, clock)
        and any(actor.stopped is None for actor in p.actors.values())
        and _exists(p.info.pid)
    ]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()  # a zombie
    except OSError:
        return True  # no /proc


def ask_for_stacks(
    directory: Path, processes: Sequence[Process], seconds: float, clock: Clock
) -> list[Process]:
    """Asks for the stacks of all threads, and waits until they are in the logs.

    Returns:
        The processes that have not replied within ``seconds``.

    Raises:
        TraceError: if the directory cannot be written to, or a log is damaged.
    """
    with ExitStack() as stack:
        readers = {id(p): (p, stack.enter_context(LogReader(p.path))) for p in processes}
        for _, reader in readers.values():
            reader.skip()
        request_stacks(directory)
        asked, pause = clock.now(), threading.Event()
        deadline = asked + seconds
        while readers and (now := clock.now()) < deadline:
            if now - asked > REPEAT_SECONDS:
                asked = now
                request_stacks(directory)
            pause.wait(POLL_SECONDS)
            readers = {key: each for key, each in readers.items() if not _has_stack(each[1])}
        return [process for process, _ in readers.values()]


def _has_stack(reader: LogReader) -> bool:
    try:
        return any(isinstance(event, StackDumped) for batch in reader.batches() for event in batch)
    except TraceError:
        return True  # damaged: Process.damage tells it, and waiting would not help
