"""Profiles all calls that a worker serves, in all its threads, with torch's legacy profiler.

    profile = rpc.remote("worker1", rpc._server_process_global_profile)
    profile.rpc_sync().__enter__()
    rpc.rpc_sync("worker1", torch.add, (x, y))
    profile.rpc_sync().__exit__(None, None, None)
    print(profile.rpc_sync().key_averages())

The profiler records each served call separately; several profiles may be active at a time. Use
``torch.profiler`` for the calling side and for everything else.
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
    """A ``torch.autograd.profiler_legacy.profile``, with the same arguments, for all calls that are served.

    After the profile, ``function_events`` has the events of all calls, and
    ``process_global_function_events`` has one list of events for each call.
    """

    process_global_function_events: list[list[Any]]

    def _start_trace(self) -> None:
        self._records: list[Any] = []  # one for each call; appending needs no lock
        profiling.served_by.append(self)
        profiling.record_served = _record_call

    def add(self, records: Any) -> None:
        """Add the records of one call."""
        self._records.append(records)

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Literal[False]:
        if not self.enabled:
            return False
        profiling.served_by.remove(self)
        start = _start_mark(self._records[0]) if self._records else None
        parsed = [_parse_events(records, start) for records in self._records]
        self._records = []
        self.process_global_function_events = parsed
        self.function_events = event_tree(
            [event for events in parsed for event in events],
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        return False


def _start_mark(records: Any) -> Any:
    """The mark with which the records of a call begin."""
    return next(mark for thread in records for mark in thread if mark.name() == "__start_profile")


def _parse_events(records: Any, start: Any) -> list[Any]:
    """Return the events of one call, with times relative to ``start``, the start mark of the first call.

    Torch's times are relative to the call's own start, so the events of successive calls of one thread would
    overlap, and some would seem nested in others.
    """
    events: list[Any] = parse_legacy_records(records)
    later = start.cpu_elapsed_us(_start_mark(records))
    for event in events:
        event.time_range.start += later
        event.time_range.end += later
    return sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))


@contextmanager
def _record_call() -> Iterator[None]:
    """Context that records the calling thread, for the profiles that are active at its start."""
    profiles = list(profiling.served_by)
    if not profiles or profiler_enabled_here():
        yield  # the thread is being recorded already, as part of another call for example
        return
    start_legacy_profiler(profiles[-1].config())
    try:
        yield
    finally:
        records = stop_legacy_profiler()
        for profile in profiles:
            profile.add(records)
