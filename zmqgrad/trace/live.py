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
from zmqgrad.trace.declarations import survey
from zmqgrad.trace.events import StackDumped
from zmqgrad.trace.job import Job
from zmqgrad.trace.log import LogReader, changed_ns
from zmqgrad.trace.model import Process
from zmqgrad.trace.stacks import request_stacks
from zmqgrad.trace.writer import own_clock

POLL_SECONDS = 0.05
"""How often logs are read for the reply. No event tells of a file that grows, on all systems and mounts."""

REMOTE_SILENCE_NANOSECONDS = 60_000_000_000
"""A process of another host that has written nothing for this long is taken for ended."""

REPEAT_SECONDS = 0.5
"""When a request is repeated: a process whose recorder is just starting does not notice the first one."""


def is_recording(process: Process) -> bool:
    """Whether ``process`` still writes its log. Of another host: whether it did in the last minute."""
    if process.has_end:
        return False
    if not _is_here(process):
        is_recent = wall_ns() - changed_ns(process.path) < REMOTE_SILENCE_NANOSECONDS
        return is_recent and (bool(process.actors) or not survey(process.path).has_end)
    return _has_open(process.info.pid, process.path)


def _has_open(pid: int, path: Path) -> bool:
    """Whether process ``pid`` of this host has the file open: its number may be reused."""
    folder, wanted = Path(f"/proc/{pid}/fd"), str(path.resolve())
    try:
        return any(os.path.realpath(link) == wanted for link in folder.iterdir())
    except PermissionError:
        return not _is_zombie(pid)  # of another user: it exists
    except OSError:
        return False


def _is_zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def is_live(process: Process) -> bool:
    """Whether ``process`` still records; of another host: whether it did in the last minute."""
    wall, time = process.samples[-1] if process.samples else (process.info.wall, process.info.monotonic)
    silence = wall_ns() - process.last - (wall - time)  # its clock may have been set since the log began
    return is_recording(process) and (_is_here(process) or silence < REMOTE_SILENCE_NANOSECONDS)


def running(job: Job) -> list[Process]:
    """The processes of this host that run and record."""
    return [process for process in job.processes if _is_here(process) and is_recording(process)]


def _is_here(process: Process) -> bool:
    return (process.info.host, process.clock) == (socket.gethostname(), own_clock())


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
