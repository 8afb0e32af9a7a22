"""What the live views of ``zmqgrad trace`` share: reading the logs of a running job until it has ended."""

from __future__ import annotations

import select
import sys
from collections.abc import Iterator

from zmqgrad.cli.trace_output import note
from zmqgrad.runtime.clock import monotonic_ns
from zmqgrad.trace.follow import Follower
from zmqgrad.trace.model import Entry

POLL_SECONDS = 0.1
CHECK_NANOSECONDS = 1_000_000_000
"""How often to look whether the job still runs."""

ENDED_NANOSECONDS = 10_000_000_000
"""How long no process may record before a job counts as ended: it may be restarting its workers."""


def polls(follower: Follower) -> Iterator[tuple[list[Entry], int]]:
    """Yields what was recorded since the last time, and the ns since something was; ends with the job.

    Raises:
        BrokenPipeError: if nobody reads our output any more.
    """
    noted: set[str] = set()
    active = recording = checked = monotonic_ns()
    while True:
        entries = follower.poll()
        now = monotonic_ns()
        if entries:
            active = recording = now
        yield entries, now - active
        if follower.behind:
            _wait(0)
            continue
        if now - checked > CHECK_NANOSECONDS:
            checked = now
            for problem in sorted(set(follower.problems.values()) - noted):
                noted.add(problem)
                note(problem)
            if follower.is_recording():
                recording = now
            elif now - recording > ENDED_NANOSECONDS:
                return
        _wait(POLL_SECONDS)


def _wait(seconds: float) -> None:
    """Waits; ends at once if the output is closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    for _, event in poll.poll(seconds * 1000):
        if event & (select.POLLERR | select.POLLHUP):
            raise BrokenPipeError
