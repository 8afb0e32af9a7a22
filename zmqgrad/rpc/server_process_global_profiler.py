"""Profile whatever a worker runs for others, in all its threads: torch's legacy profiler, by torch's name.

    profile = rpc.remote("worker1", rpc._server_process_global_profile)
    profile.rpc_sync().__enter__()
    rpc.rpc_sync("worker1", torch.add, (x, y))
    profile.rpc_sync().__exit__(None, None, None)
    print(profile.rpc_sync().key_averages())

Each call that is served meanwhile is recorded by itself; several profiles may be active at a time. For what
the calling side does, and for everything else, there is ``torch.profiler``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch.autograd import profiler_legacy

from zmqgrad.rpc import profiling
from zmqgrad.rpc.torch_internals import (
    event_tree,
    parse_legacy_records,
    profiler_enabled_here,
    start_legacy_profiler,
    stop_legacy_profiler,
)

__all__ = ["_server_process_global_profile"]


class _server_process_global_profile(profiler_legacy.profile):
    """As ``torch.autograd.profiler_legacy.profile``, whose arguments it takes, for all calls that are served.

    Afterwards ``function_events`` has the events of all of them, and ``process_global_function_events`` a
    list for each call.
    """

    process_global_function_events: list[list[Any]]

    def _start_trace(self) -> None:
        self._records: list[Any] = []  # one for each call; appending needs no lock
        profiling.served_by.append(self)
        profiling.record_served = _recorded

    def note(self, records: Any) -> None:
        """What was recorded of one call."""
        self._records.append(records)

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Literal[False]:
        if not self.enabled:
            return False
        profiling.served_by.remove(self)
        first = _beginning(self._records[0]) if self._records else None
        parsed = [_events_since(first, records) for records in self._records]
        self._records = []
        self.process_global_function_events = parsed
        self.function_events = event_tree(
            [event for events in parsed for event in events],
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        return False


def _beginning(records: Any) -> Any:
    """The mark that the profiler sets first in what it records of a call."""
    return next(mark for thread in records for mark in thread if mark.name() == "__start_profile")


def _events_since(first: Any, records: Any) -> list[Any]:
    """The events of one call, timed since ``first``, the beginning of another.

    Torch times them since the beginning of their own call. Then those of several calls that one thread served
    seem to be at the same time, and some within others.
    """
    events: list[Any] = parse_legacy_records(records)
    later = first.cpu_elapsed_us(_beginning(records))
    for event in events:
        event.time_range.start += later
        event.time_range.end += later
    return sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))


@contextmanager
def _recorded() -> Iterator[None]:
    """Record what the calling thread does, for the profiles that are active now."""
    takers = list(profiling.served_by)
    if not takers or profiler_enabled_here():
        yield  # as part of a call that is being recorded, or of something else that is
        return
    start_legacy_profiler(takers[-1].config())
    try:
        yield
    finally:
        records = stop_legacy_profiler()
        for taker in takers:
            taker.note(records)
